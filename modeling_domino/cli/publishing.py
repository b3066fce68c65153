"""`domino card` and `push`: cards from files, and folders to the Hub. The work is done by `hub_cards/` of the checkout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from modeling_domino.atomic import write_text
from modeling_domino.cli.app import AsJson, app, one_sentence_errors, warnings_as_notices
from modeling_domino.cli.checkout import from_checkout


Name = Annotated[str, typer.Argument(help="Folder of hub_cards/, space_app, kernels, or a path.")]


@app.command()
def card(
    name: Annotated[str, typer.Argument(help="Folder of hub_cards/ or a path; of a Markdown page its engine table.")],
    repo_id: Annotated[
        str | None, typer.Option(help="Repository that the snippets name; by default ORG/NAME.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Tag that the snippets pin; by default v1.")] = None,
) -> None:
    """Render a card from a folder's config, training record and results, and check it."""
    with one_sentence_errors(), warnings_as_notices():
        if name.endswith(".md"):
            cards = from_checkout("hub_cards.cards", "card")
            write_text(Path(name), cards.render_page(Path(name)))
            typer.echo(name)
            return
        staging = from_checkout("hub_cards.staging", "card")
        path = staging.write_card(name, repo_id=repo_id, tag=tag)
        lint = from_checkout("hub_cards.lint", "card")
        problems = lint.card_problems(path.parent, staging.kind_of(path.parent), repo_id)
    typer.echo(path)
    for problem in problems:
        typer.echo(f"Error: {problem}", err=True)
    if problems:
        raise typer.Exit(2)


@app.command()
def push(
    name: Name,
    repo_id: Annotated[str, typer.Option(help="ORG/NAME of the repository.")],
    tag: Annotated[str, typer.Option(help="Tag to create; of a kernel the branch of its version, v1, v2, ...")],
    execute: Annotated[bool, typer.Option("--execute", help="Send it; without, nothing is sent.")] = False,
    pr: Annotated[bool, typer.Option("--pr", help="Open a pull request instead of committing.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove what is only on the Hub.")] = False,
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository public; a new one is private.")
    ] = False,
    collection: Annotated[str | None, typer.Option(help="Title of a collection of ORG to put it into.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Send nothing; prove that the tag on the Hub equals a git tag.")
    ] = False,
    git_tag: Annotated[str | None, typer.Option(help="Git tag to verify against; by default --tag.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to stage in; by default dist/ORG--NAME.")] = None,
    as_json: AsJson = False,
) -> None:
    """Stage, check and publish a repository; a dry run by default. Exit code 3: what is there is not what should be."""
    with one_sentence_errors(), warnings_as_notices():
        publish = from_checkout("hub_cards.publish", "push")
        refused = from_checkout("hub_cards.lint", "push").LintError
        options = {"public": public, "pull_request": pr, "collection": collection}
        try:
            if verify:
                _require_alone(execute=execute, prune=prune, **options)
                verification = from_checkout("hub_cards.verification", "push")
                names = {"repo_id": repo_id, "tag": tag, "git_tag": git_tag or tag}
                verification.verify_against_git(name, output=output, **names)
                report = {**names, "verified": True}
                typer.echo(f"{repo_id} at {tag} holds what the git tag {git_tag or tag} makes.")
            elif git_tag is not None:
                raise ValueError("`--git-tag` says what to verify against; add --verify, or leave it out.")
            else:
                report = _push(name, repo_id, tag, output, prune=prune, execute=execute, **options)
        except refused as error:
            for problem in error.problems:
                typer.echo(f"- {problem}", err=True)
            raise
        except publish.VerificationError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(3) from None
    if as_json:
        typer.echo(json.dumps(report))


def _require_alone(**others: object) -> None:
    """Refuses options that `--verify`, which sends nothing, could only ignore."""
    names = {"pull_request": "pr"}
    if given := [f"--{names.get(name, name)}" for name, value in others.items() if value]:
        raise ValueError(f"`--verify` sends nothing; leave out {', '.join(given)}, or --verify.")


def _push(name: str, repo_id: str, tag: str, output: Path | None, *, prune: bool, execute: bool, **options) -> dict:
    publish, staging = (from_checkout(f"hub_cards.{part}", "push") for part in ("publish", "staging"))
    publish.require_options(staging.kind_of(staging.publishable_folder(name)), **options)
    publication = staging.prepare(name, repo_id=repo_id, tag=tag, output=output)
    try:
        plan = publish.make_plan(publication, prune=prune, pull_request=options["pull_request"])
    except ValueError as error:
        if execute:
            raise
        typer.echo(f"Not compared with the Hub: {error}", err=True)
        plan = publish.offline_plan(publication)
    for line in plan.lines():
        typer.echo(line)
    if execute:
        report = publish.push(publication, plan, **options)
        proposed = report.get("pull_request_url") or report.get("pull_request")
        typer.echo(f"{'Sent' if report['sent'] else 'Nothing to send'}: {proposed or report['url']}")
        return report
    outlook = "--execute would be refused" if plan.refused else "--execute sends it"
    typer.echo(f"Dry run: nothing was sent to {publication.url}; {outlook}.")
    return {"repo_id": repo_id, "url": publication.url, "sent": False, **plan.summary()}
