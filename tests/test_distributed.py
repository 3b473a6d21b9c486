"""Tensor-parallel and pipelined generation over compressed caches: two local ranks, mlx's ring backend on loopback.

Run as a program, with MLX_RANK and MLX_HOSTFILE set, it is one rank, which saves its results in the folder it is given.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm")
from archs.configs import build
from archs.probe import FORMAT, PROMPT, tokens
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

import mlx_tq

pytestmark = pytest.mark.skipif(not mx.distributed.is_available(), reason="this MLX has no distributed back end")

RANKS, STEPS = 2, 8
TENSOR, PIPELINE = ("llama", "gpt_oss"), ("qwen2", "deepseek_v3")


def generated(model, caches):
    """Greedy tokens `(STEPS,)` and their log-probabilities `(STEPS, vocabulary)`."""
    steps = generate_step(mx.array(tokens(PROMPT)), model, max_tokens=STEPS, prompt_cache=caches)
    ids, logprobs = zip(*steps, strict=True)
    return np.array(ids), np.array(mx.stack(logprobs))


def rank(folder):
    """What one rank does."""
    group = mx.distributed.init(strict=True, backend="ring")
    for name in TENSOR + PIPELINE:
        model = build(name)
        if name in TENSOR:
            model.shard(group)
        else:
            model.model.pipeline(group)
        mlx_tq.enable(model, FORMAT)
        caches = make_prompt_cache(model)
        ids, logprobs = generated(model, caches)
        with mx.stream(generation_stream):  # generate_step leaves a step under way, which the other rank takes part in
            mx.eval(mx.distributed.all_sum(mx.ones(1), group=group))
        heads = [cache.rows[0].n_kv_heads for cache in caches if isinstance(cache, mlx_tq.TQKVCache)]
        np.savez(folder / f"{name}{group.rank()}.npz", ids=ids, logprobs=logprobs, heads=heads)


def free_ports(n):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A function that gives the results of every rank for a model; all models run at the first use."""
    folder = tmp_path_factory.mktemp("ranks")
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(RANKS)]))
    environments = [{**os.environ, "MLX_RANK": str(i), "MLX_HOSTFILE": str(hosts)} for i in range(RANKS)]
    command = [sys.executable, __file__, str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, env=environment, **pipes) for environment in environments]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * RANKS, "\n".join(outputs)
    return lambda name: [np.load(folder / f"{name}{i}.npz") for i in range(RANKS)]


def check(found, ids, logprobs):
    """Every rank gives what one alone gives. Sums over ranks round in another order, which can flip a code."""
    for result in found:
        for got_id, want_id, got, want in zip(result["ids"], ids, result["logprobs"], logprobs, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=5e-3)
            if got_id != want_id:  # as good as equally likely; from here on the sequences differ
                assert want.max() - want[got_id] < 1e-2
                break


@pytest.mark.parametrize("name", TENSOR)
def test_tensor_parallel(results, name):
    """Every rank caches its share of the KV heads."""
    model = build(name)
    check(results(name), *generated(model, mlx_tq.make_prompt_cache(model, FORMAT)))
    assert all(set(result["heads"]) == {1} for result in results(name))


@pytest.mark.parametrize("name", PIPELINE)
def test_pipeline(results, name):
    """Every rank caches its own layers; mlx-lm ties the arrays of a cache to what the rank sends."""
    model = build(name)
    caches = mlx_tq.make_prompt_cache(model, FORMAT)
    share = len(caches) // RANKS
    for i, cache in enumerate(caches):  # a rank counts its layers from 0, and their rotation goes by that number
        caches[i] = type(cache)(cache.format, layer_index=i % share)
    check(results(name), *generated(model, caches))
    assert all(len(result["heads"]) == share for result in results(name))


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
