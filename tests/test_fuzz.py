"""Any life of a batched cache: a single cache each follows its rows, and a stock batch its padding and masks."""

import copy

import mlx.core as mx
import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle import max_error, poison_cache, to64
from test_batch import BatchKVCache, attend, cache_module, same_mask
from test_cache import FORMATS, contents

from mlx_tq import TQKVCache
from mlx_tq.batch import TQBatchKVCache


class AnyLife(RuleBasedStateMachine):
    """Rows join, leave, grow, shrink, are padded on either side, copied and saved, also amid a prompt."""

    @initialize(name=st.sampled_from(sorted(FORMATS)), seed=st.integers(0, 1000))
    def start(self, name, seed):
        self.format, self.rng, self.steps = FORMATS[name], np.random.default_rng(seed), 0
        self.batch, self.stock, self.solos = *self.new([40, 0]), self.made

    def draw(self, n, b=1):
        return tuple(mx.array(self.rng.standard_normal((b, 1, n, 32)).astype(np.float32)) for _ in range(2))

    def new(self, lengths):
        """A batch, a stock batch and (in `made`) single caches of new sequences."""
        self.made, stocks = [], []
        for n in lengths:
            solo, stock = TQKVCache(self.format, 2), cache_module.KVCache()
            if n:
                k, v = self.draw(n)
                solo.update_and_fetch(k, v)
                stock.update_and_fetch(k, v)
            self.made.append(solo)
            stocks.append(stock)
        return TQKVCache.merge(self.made), BatchKVCache.merge(stocks)

    def attend(self, k, v, lengths):
        """Appends rows whose first lengths[b] are real to all, and compares attention."""
        n = k.shape[2]
        pending = [max(0, -offset) for offset in self.batch.offset.tolist()]
        mask, stock_mask = self.batch.make_mask(n), self.stock.make_mask(n)
        assert same_mask(mask, stock_mask)
        q = mx.array(self.rng.standard_normal((k.shape[0], 2, n, 32)).astype(np.float32))
        out = attend(q, self.batch.update_and_fetch(k, v), mask)
        self.stock.update_and_fetch(k, v)
        for i, (solo, live, skip) in enumerate(zip(self.solos, lengths, pending, strict=True)):
            if skip >= live:
                continue
            part = (slice(i, i + 1), slice(None), slice(skip, live))
            want = attend(q[part], solo.update_and_fetch(k[part], v[part]), "causal")
            assert max_error(out[part], to64(want)) < 3e-6

    def append(self, k, v, lengths):
        """Appends the same without attention."""
        self.batch.update_and_fetch(k, v)
        self.stock.update_and_fetch(k, v)
        for i, (solo, live) in enumerate(zip(self.solos, lengths, strict=True)):
            if live:
                solo.update_and_fetch(*(x[i : i + 1, :, :live] for x in (k, v)))

    def padding_to_come(self):
        """Whether rows have left padding to come: the stock batch cannot do everything with them."""
        return any(offset < 0 for offset in self.batch.offset.tolist())

    # Not before 40 operations, so that lives get long.
    @precondition(lambda self: self.steps >= 40)
    @rule(padding=st.lists(st.sampled_from((0, 2, 40)), min_size=1, max_size=3), first=st.sampled_from((1, 3, 50)))
    def start_again_with_left_padding(self, padding, first):
        self.steps = 0
        padding = [n - min(padding) for n in padding]
        self.batch = TQBatchKVCache([0] * len(padding), self.format, 2)
        self.stock = BatchKVCache([0] * len(padding))
        for cache in (self.batch, self.stock):
            cache.prepare(left_padding=padding)
        self.solos = [TQKVCache(self.format, 2) for _ in padding]
        self.attend(*self.draw(first, len(padding)), [first] * len(padding))

    @rule(n=st.sampled_from((1, 1, 1, 2, 5, 33, 70)))
    def step(self, n):
        self.attend(*self.draw(n, len(self.solos)), [n] * len(self.solos))

    @precondition(lambda self: not self.padding_to_come())
    @rule(data=st.data(), chunk=st.sampled_from((3, 40, 500)), known=st.booleans())
    def prompt(self, data, chunk, known):
        lengths = [data.draw(st.sampled_from((1, 2, 7, 40, 130))) for _ in self.solos]
        n = max(lengths)
        k, v = self.draw(n, len(lengths))
        right = [n - length for length in lengths]
        self.batch.prepare(right_padding=right, **({"lengths": lengths} if known else {}))
        self.stock.prepare(lengths=lengths, right_padding=right)
        # Without lengths tokens are packed late, so attention is not yet that of the sequence alone.
        take = self.attend if known else self.append
        for start in range(0, n, chunk):
            rows = k[:, :, start : start + chunk], v[:, :, start : start + chunk]
            take(*rows, [max(0, min(length - start, chunk)) for length in lengths])
            self.keep(data.draw(st.sampled_from(("as it is", "copy", "state", "poison"))))
        for cache in (self.batch, self.stock):
            cache.finalize()

    @rule(lengths=st.lists(st.sampled_from((0, 1, 35, 80, 130)), min_size=1, max_size=2), front=st.booleans())
    def extend(self, lengths, front):
        if len(self.solos) > 3:
            return
        batch, stock = self.new(lengths)
        if front:
            (batch, self.batch), (stock, self.stock) = (self.batch, batch), (self.stock, stock)
        self.batch.extend(batch)
        self.stock.extend(stock)
        self.solos = self.made + self.solos if front else self.solos + self.made

    @rule(data=st.data())
    def filter(self, data):
        keep = data.draw(st.permutations(range(len(self.solos))))[: data.draw(st.integers(1, len(self.solos)))]
        if all(self.batch.offset[i].item() < 0 for i in keep):
            return  # the stock batch ends with less than no columns
        self.batch.filter(keep)
        self.stock.filter(keep)
        self.solos = [self.solos[i] for i in keep]

    @rule(n=st.sampled_from((0, 1, 3, 34, 60, 300)))
    def trim(self, n):
        if self.batch.empty():
            return
        assert self.batch.trim(n) == self.stock.trim(n)
        for solo in self.solos:
            solo.trim(n)

    @precondition(lambda self: not self.padding_to_come())
    @rule(data=st.data())
    def take_out_and_put_back(self, data):
        i = data.draw(st.integers(0, len(self.solos) - 1))
        self.made, stock = [self.batch.extract(i)], BatchKVCache.merge([cache_module.KVCache()])
        if not self.batch.empty():
            stock = BatchKVCache.merge([self.stock.extract(i)])
        self.batch.extend(TQKVCache.merge(self.made))
        self.stock.extend(stock)
        keep = [j for j in range(len(self.solos)) if j != i] + [len(self.solos)]
        self.batch.filter(keep)
        self.stock.filter(keep)
        self.solos = self.solos[:i] + self.solos[i + 1 :] + self.made

    @rule(data=st.data(), n=st.sampled_from((1, 40)))
    def go_on_alone(self, data, n):
        """A row that is taken out goes on as a single cache, and changes nothing in the batch."""
        i = data.draw(st.integers(0, len(self.solos) - 1))
        if self.batch.offset[i].item() < 0:
            return
        before = contents(self.batch)
        alone, solo = self.batch.extract(i), copy.deepcopy(self.solos[i])
        rows = self.draw(n)
        for cache in (alone, solo):
            cache.update_and_fetch(*rows)
            cache.trim(n // 2)
        assert contents(alone) == contents(solo)
        poison_cache(alone)
        mx.eval(alone.keys, alone.values)
        assert contents(self.batch) == before

    @rule(how=st.sampled_from(("copy", "state", "poison")))
    def keep(self, how):
        if how == "copy":
            self.batch = copy.deepcopy(self.batch)
        elif how == "state":
            self.batch = TQBatchKVCache.from_state(self.batch.state)
        elif how == "poison" and not self.batch.empty():
            poison_cache(self.batch)

    @invariant()
    def rows_are_as_alone(self):
        if not hasattr(self, "batch"):
            return
        assert self.batch.size() == self.stock.size()
        assert np.array_equal(np.array(self.batch.offset), np.array(self.stock.offset))
        assert np.array_equal(np.array(self.batch.left_padding), np.array(self.stock.left_padding))
        self.steps += 1
        everything = self.steps % 4 == 0
        for i, solo in enumerate(self.solos):
            if everything and solo.offset:
                assert contents(self.batch.extract(i)) == contents(solo)
            assert max(0, self.batch.offset[i].item()) == solo.offset


def test_any_life_of_200_operations():
    phases = (Phase.explicit, Phase.generate)  # shrinking a long life takes longer than reading it
    options = settings(max_examples=9, stateful_step_count=200, deadline=None, derandomize=True, phases=phases)
    run_state_machine_as_test(AnyLife, settings=options)
