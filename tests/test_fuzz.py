"""Any life of a batched cache, with what `AnyLife` leaves out: left padding, late lengths, changes amid a prompt."""

import copy

import mlx.core as mx
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from oracle import poison_cache
from test_batch import AnyLife, BatchKVCache
from test_cache import contents

from mlx_tq import TQKVCache
from mlx_tq.batch import TQBatchKVCache


class AnyPrompt(AnyLife):
    """Prompts that are padded on either side, and caches that are copied and saved amid them."""

    @rule(padding=st.lists(st.sampled_from((0, 2, 40)), min_size=1, max_size=3), first=st.sampled_from((1, 3, 50)))
    def start_again_with_left_padding(self, padding, first):
        padding = [n - min(padding) for n in padding]
        self.batch = TQBatchKVCache([0] * len(padding), self.format, 2)
        self.stock = BatchKVCache([0] * len(padding))
        for cache in (self.batch, self.stock):
            cache.prepare(left_padding=padding)
        self.solos = [TQKVCache(self.format, 2) for _ in padding]
        # The second chunk ends past the padding, so that the other rules apply.
        for n in (first, max(padding) + 1):
            self.attend(*self.draw(n, len(padding)), [n] * len(padding))
        self.checked()

    @rule(data=st.data(), chunk=st.sampled_from((5, 60)), known=st.booleans(), back=st.integers(0, 4))
    def prompt_with_changes_amid(self, data, chunk, known, back):
        if any(offset < 0 for offset in self.batch.offset.tolist()):
            return
        lengths = [data.draw(st.sampled_from((1, 6, 45, 130))) for _ in self.solos]
        n = max(lengths)
        k, v = self.draw(n, len(lengths))
        right = [n - length for length in lengths]
        self.batch.prepare(right_padding=right, **({"lengths": lengths} if known else {}))
        self.stock.prepare(lengths=lengths, right_padding=right)
        for start in range(0, n, chunk):
            rows = k[:, :, start : start + chunk], v[:, :, start : start + chunk]
            live = [max(0, min(length - start, chunk)) for length in lengths]
            if known:
                self.attend(*rows, live)
            else:  # tokens are packed late, so attention is not yet that of the sequence alone
                self.batch.update_and_fetch(*rows)
                self.stock.update_and_fetch(*rows)
                for i, (solo, m) in enumerate(zip(self.solos, live, strict=True)):
                    if m:
                        solo.update_and_fetch(*(x[i : i + 1, :, :m] for x in rows))
            self.keep(data.draw(st.sampled_from(("copy", "state", "poison"))))
        for cache in (self.batch, self.stock):
            cache.finalize()
        self.trim(back)
        self.checked()

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

    def checked(self):
        for i, solo in enumerate(self.solos):
            assert not solo.offset or contents(self.batch.extract(i)) == contents(solo)


def test_any_prompts_of_200_operations():
    phases = (Phase.explicit, Phase.generate)  # shrinking a long life takes longer than reading it
    options = settings(max_examples=3, stateful_step_count=200, deadline=None, derandomize=True, phases=phases)
    run_state_machine_as_test(AnyPrompt, settings=options)
