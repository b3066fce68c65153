"""What a training run starts from: target, new drafter, warm start, heads put on and taken off."""

from __future__ import annotations

import errno
import gzip
import http.server
import json
import threading

import pytest
import torch
from conftest import tiny_drafter, tiny_target, tiny_tokenizer
from test_training_model import batch_of, module_of

from modeling_domino.training.data import render_prompt
from modeling_domino.training.pair import (
    PairArguments,
    check_mask_token,
    load_drafter,
    new_config,
    spread_taps,
    with_new_head,
    without_head,
)
from modeling_domino.training.regenerate import Decoding, answer_by_server, regenerate
from modeling_domino.training.warm_start import warm_start


def pair_of(**changes) -> PairArguments:
    fields = {"block_size": 4, "num_layers": 2, "mask_token_id": 63, "gru_hidden_dim": 12, "emb_dim": 6}
    return PairArguments(**{**fields, **changes})


def test_a_new_drafter_has_the_targets_shapes_and_spread_taps():
    assert spread_taps(36) == [1, 9, 17, 25, 33]
    assert spread_taps(30) == [1, 8, 14, 20, 27]
    assert spread_taps(4) == [1] and spread_taps(1) == [0]
    target = tiny_target()
    config = new_config(pair_of(target_layer_ids=[1, 3]), target)
    assert (config.hidden_size, config.head_dim, config.num_target_layers) == (32, 8, 6)
    assert config.shift_label and config.pure_draft_prefix_len == 1
    assert not new_config(pair_of(gru_hidden_dim=0), target).has_head
    with pytest.raises(ValueError, match="`mask_token_id` must name a token that never occurs in text"):
        new_config(pair_of(mask_token_id=None), target)


def test_a_warm_start_copies_the_last_layers_and_passes_the_last_tap_on():
    target = tiny_target()
    drafter = load_drafter(pair_of(target_layer_ids=[1, 3]), target, seed=0)
    for mine, theirs in zip(drafter.layers, target.model.layers[-2:], strict=True):
        copied = theirs.state_dict()
        assert copied.keys() == mine.state_dict().keys()
        assert all(torch.equal(tensor, copied[name]) for name, tensor in mine.state_dict().items())
    taps = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drafter.fc(taps), taps[..., 32:])
    batch = batch_of(drafter, 12)
    module = module_of(target, drafter).eval()
    stats = module(**batch).stats
    # The correction is zero at the start, the same seed gives the same drafter.
    torch.testing.assert_close(stats[4], stats[5])
    again = load_drafter(pair_of(target_layer_ids=[1, 3]), target, seed=0).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in drafter.state_dict().items())


def test_a_warm_start_from_other_shapes_is_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="start from random weights with `--no-warm-start`"):
        warm_start(tiny_drafter(target), target)


def test_a_mask_token_without_a_signal_is_refused():
    target = tiny_target()
    drafter = tiny_drafter(target)
    check_mask_token(drafter.config, target)
    with torch.no_grad():
        target.get_input_embeddings().weight[drafter.config.mask_token_id] *= 1e-3
    with pytest.raises(ValueError, match="The mask token 63 has an embedding row of norm"):
        check_mask_token(drafter.config, target)


def test_another_target_is_refused_before_training():
    drafter = tiny_drafter(tiny_target())
    with pytest.raises(ValueError, match="trained for a target of 6 layers"):
        module_of(tiny_target(num_layers=5), drafter)
    with pytest.raises(ValueError, match="`init_from` must be a drafter's folder or Hub id"):
        load_drafter(pair_of(init_from="./nowhere"), tiny_target(), seed=0)


def test_a_head_is_taken_off_and_a_new_one_changes_nothing_yet():
    target = tiny_target()
    drafter = tiny_drafter(target)
    bare = without_head(drafter)
    assert not bare.config.has_head and bare.config.shift_label
    headed = with_new_head(bare, pair_of())
    batch = batch_of(drafter, 12)
    expected = module_of(target, bare).eval()(**batch).stats
    torch.testing.assert_close(module_of(target, headed).eval()(**batch).stats, expected)
    assert torch.equal(headed.fc.weight, drafter.fc.weight)


def test_a_server_answers_with_ids_or_text():
    """The OpenAI protocol: ids where the server returns them, else its text encoded again; the stop token is put back."""
    tokenizer = tiny_tokenizer()
    asked = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            choice = {"text": "b c", "finish_reason": "stop"}
            if len(asked) == 2:
                choice = {"text": "", "token_ids": [9, 8, 7], "finish_reason": "length"}
            body = json.dumps({"choices": [choice]}).encode()
            self.send_response(200 if self.path == "/v1/completions" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        answer = answer_by_server(url, "m", tokenizer, Decoding("t", max_new_tokens=7), parallel=1)
        assert answer([["a"], ["a"]], 3) == [([5, 6, 3], "eos"), ([9, 8, 7], "length")]
        with pytest.raises(ValueError, match="must answer completions of the OpenAI protocol"):
            answer_by_server(f"{url}/x", "m", tokenizer, Decoding("t"), parallel=1)([["a"]], 0)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert asked[0]["prompt"] == render_prompt(tokenizer, ["a"])
    assert (asked[0]["max_tokens"], asked[0]["temperature"], asked[0]["seed"]) == (7, 0.0, 3)


def test_a_full_disk_leaves_whole_shards_only(tmp_path, monkeypatch):
    prompts = [{"id": str(i), "turns": ["a"]} for i in range(4)]
    opened = gzip.open

    def full(path, *args, **kwargs):
        file = opened(path, *args, **kwargs)
        if "00001" in str(path):

            def write(text):
                raise OSError(errno.ENOSPC, "No space left on device")

            file.write = write
        return file

    def answer(talks, seed):
        return [([5, 6], "length") for _ in talks]

    monkeypatch.setattr(gzip, "open", full)
    with pytest.raises(OSError, match="No space left on device"):
        regenerate(prompts, tmp_path, answer, tiny_tokenizer(), Decoding("t"), shard_size=2, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers-00000.jsonl.gz", "regenerate.json"]
    monkeypatch.setattr(gzip, "open", opened)
    shards = regenerate(prompts, tmp_path, answer, tiny_tokenizer(), Decoding("t"), shard_size=2, progress=False)
    assert len(shards) == 2
