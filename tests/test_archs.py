"""Every architecture of mlx-lm over compressed caches, as tiny models with random weights."""

import copy
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

mlx_lm = pytest.importorskip("mlx_lm")
import msl  # noqa: E402
from archs import configs, table  # noqa: E402
from archs.probe import FORMAT, PROMPT, decoding, forward, recorded, tokens  # noqa: E402
from mlx_lm.models import cache as cache_module  # noqa: E402
from oracle import attention64, decode64, to64  # noqa: E402

import mlx_tq  # noqa: E402
from mlx_tq import TQFormat  # noqa: E402

pytestmark = pytest.mark.archs

# These run on every change: plain, sliding windows, sinks, soft-capped scores, latent attention, recurrent layers, and
# two caches a layer.
SHORT = ("deepseek_v3", "gemma2", "gemma3", "gpt_oss", "llama", "longcat_flash", "qwen3", "qwen3_next")
NAMES = [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in configs.names()]
EXACT = TQFormat(window=2 * PROMPT)  # nothing is packed
STEPS = tokens(5, seed=1)


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    if name in configs.METAL and not mx.metal.is_available() and not msl.available()[0]:
        pytest.skip(f"{name} runs kernels of mlx-lm: {msl.available()[1]}")
    return configs.build(name)


def error(got, want):
    """Largest difference of logits, in standard deviations of theirs."""
    got, want = to64(got), to64(want)
    assert np.isfinite(got).sum() == np.isfinite(want).sum() and np.isfinite(want).any()
    seen = np.isfinite(want)
    return np.abs(got[seen] - want[seen]).max() / want[seen].std()


def run(model, caches, *pieces):
    """Logits of pieces of a sequence, one after the other."""
    return mx.concatenate([forward(model, caches, ids) for ids in pieces])


def prompt_and_steps(model, caches):
    return run(model, caches, tokens(PROMPT), *([token] for token in STEPS))


def test_the_table_is_right(name, model):
    assert table.read().get(name) == table.row(name, model), f"see {table.__doc__}"


def test_every_call_of_attention(model):
    """Attention over packed rows, and the decoded rows of those who compute themselves, against float64."""
    with recorded() as (calls, decoded):
        prompt_and_steps(model, mlx_tq.make_prompt_cache(model, FORMAT))
    for (q, keys, values), options, got in calls:
        want = attention64(q, decode64(keys), decode64(values), **options)
        np.testing.assert_allclose(to64(got), want, rtol=0, atol=2e-5 * np.abs(want).max())
    for rows, got in decoded:
        want = decode64(rows)
        np.testing.assert_allclose(to64(got), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_exact_rows_give_the_logits_of_the_stock_cache(model):
    stock = prompt_and_steps(model, cache_module.make_prompt_cache(model))
    assert error(prompt_and_steps(model, mlx_tq.make_prompt_cache(model, EXACT)), stock) < 2e-3


def test_packed_rows_give_the_tokens_of_decoded_ones(model):
    """Greedy tokens and their logits; rounding may flip a code, so nearly the same."""
    caches, twins = (mlx_tq.make_prompt_cache(model, FORMAT) for _ in range(2))
    ids = tokens(PROMPT)
    for _ in range(6):
        got = forward(model, caches, ids)[-1]
        with decoding():
            want = forward(model, twins, ids)[-1]
        difference = error(got, want)
        assert difference < 1e-2
        top = np.sort(to64(want)[np.isfinite(to64(want))])
        ids = [got.argmax().item()]
        assert ids == [want.argmax().item()] or top[-1] - top[-2] < 2 * difference * top.std()


def test_a_saved_prompt_goes_on(model, tmp_path):
    path = str(tmp_path / "prompt.safetensors")

    def saved_and_not(caches):
        run(model, caches, tokens(PROMPT))
        cache_module.save_prompt_cache(path, caches)
        more = tokens(7, seed=2), [5]
        return run(model, cache_module.load_prompt_cache(path), *more), run(model, caches, *more)

    try:
        saved_and_not(cache_module.make_prompt_cache(model))
    except KeyError as lost:
        pytest.skip(f"mlx-lm does not load its own {lost}")
    assert mx.array_equal(*saved_and_not(mlx_tq.make_prompt_cache(model, FORMAT))).item()


def test_a_trimmed_prompt_goes_on(model):
    caches = mlx_tq.make_prompt_cache(model, FORMAT)
    run(model, caches, tokens(PROMPT))
    stock = cache_module.make_prompt_cache(model)
    run(model, stock, tokens(PROMPT))
    assert cache_module.can_trim_prompt_cache(caches) == cache_module.can_trim_prompt_cache(stock)
    if not cache_module.can_trim_prompt_cache(caches):
        pytest.skip("mlx-lm does not trim this model's caches")
    steps = [[token] for token in STEPS]
    before = run(model, caches, *steps)
    assert cache_module.trim_prompt_cache(caches, len(STEPS)) == len(STEPS)
    assert error(run(model, caches, *steps), before) < 1e-4


def batch_error(model, make):
    """How far the logits of two sequences in a batch, and of what is extracted, are from those of each alone."""
    alone = [make(), make()]
    for seed, caches in enumerate(alone):
        run(model, caches, tokens(60 + 40 * seed, seed))
    batch = [type(pair[0]).merge(list(pair)) for pair in zip(*copy.deepcopy(alone), strict=True)]
    worst = 0
    for a, b in pairwise(STEPS[:4]):
        logits = model(mx.array([[a], [b]]), cache=batch).astype(mx.float32)
        worst = max(worst, *(error(logits[i], run(model, alone[i], [token])) for i, token in enumerate((a, b))))
    for i, caches in enumerate(alone):
        extracted = [cache.extract(i) for cache in batch]
        worst = max(worst, error(run(model, extracted, [9]), run(model, caches, [9])))
    return worst


def test_a_batch_goes_on(model):
    try:
        stock = batch_error(model, lambda: cache_module.make_prompt_cache(model))
    except (AttributeError, TypeError, ValueError) as problem:
        pytest.skip(f"mlx-lm's own caches cannot do this: {problem}")
    if stock > 1e-3:
        pytest.skip(f"mlx-lm's own logits of a batch are {stock:.2g} standard deviations off")
    assert batch_error(model, lambda: mlx_tq.make_prompt_cache(model, FORMAT)) < 1e-2


@pytest.mark.slow
def test_the_table_has_every_architecture():
    assert list(table.read()) == configs.names()


def test_most_architectures_are_fused():
    kinds = [line.split("|")[2].strip() for line in table.read().values()]
    assert kinds.count("fused") >= 106
