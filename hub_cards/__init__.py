"""Cards and publishing: what turns the folders beside this file into repositories on the Hub. Needs a checkout."""
