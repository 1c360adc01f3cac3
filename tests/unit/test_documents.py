"""Documents of a microbatch: where they begin, which keys are hidden, and which predictions count."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, _get_ltor_masks_and_position_ids
from megatron.core.transformer.utils import get_sliding_window_causal_mask

from megatron_balance.device.documents import document_numbers, documents_of, hidden_keys
from megatron_balance.training.data import prediction_mask, prediction_masks
from tests.unit.commands import CPU, GPU, checked_on, parse

END = 9
"""End-of-document token."""


@st.composite
def microbatches(draw: st.DrawFn) -> torch.Tensor:
    """Draw tokens [b, s], of which many end a document."""
    samples = draw(st.integers(1, 3))
    length = draw(st.integers(2, 12))
    token = st.sampled_from([1, 2, END])
    return torch.tensor([draw(st.lists(token, min_size=length, max_size=length)) for _ in range(samples)])


def upstream(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask [b, 1, s, s] and the positions [b, s] that megatron-core's data set would give each sample."""
    found = [_get_ltor_masks_and_position_ids(one, END, True, True, False, True) for one in tokens]
    return torch.stack([mask for mask, *_ in found]), torch.stack([positions for *_, positions in found])


def numbers_of(tokens: torch.Tensor) -> torch.Tensor:
    return document_numbers(documents_of(upstream(tokens)[1]), *tokens.shape)


@given(microbatches())
def test_documents_are_cumulative_lengths(tokens: torch.Tensor) -> None:
    """The form that packed sequences take: [0, ..., number of tokens], with a boundary between any two samples."""
    documents = documents_of(upstream(tokens)[1])
    ended = torch.nn.functional.pad(tokens[:, :-1] == END, (1, 0), value=True)
    assert documents.tolist() == [*ended.flatten().nonzero().flatten().tolist(), tokens.numel()]
    assert documents.dtype == torch.int32


@given(microbatches())
def test_the_mask_is_that_of_megatrons_data_set(tokens: torch.Tensor) -> None:
    mask, _ = upstream(tokens)
    assert torch.equal(hidden_keys(numbers_of(tokens), tokens.shape[1]), mask)


@given(microbatches(), st.data())
def test_queries_at_the_end_and_windows(tokens: torch.Tensor, data: st.DataObject) -> None:
    """Part of the queries have part of the rows; a window hides what it hides without documents."""
    length = tokens.shape[1]
    queries = data.draw(st.integers(1, length))
    window = data.draw(st.sampled_from([None, (0, 0), (2, 0)]))
    mask, _ = upstream(tokens)
    if window is not None:
        mask = mask | get_sliding_window_causal_mask(length, length, window)
    assert torch.equal(hidden_keys(numbers_of(tokens), queries, window), mask[:, :, length - queries :])


@given(microbatches(), st.integers(1, 3), st.booleans())
def test_predictions_read_and_end_in_one_document(tokens: torch.Tensor, depths: int, apart: bool) -> None:
    """At depth d, a token reads the d tokens after it, and its loss is masked where that of the d-th is."""
    loss_mask = (tokens != END).float()
    batch = {"loss_mask": loss_mask} | ({"documents": documents_of(upstream(tokens)[1])} if apart else {})
    masks = prediction_masks(batch, depths)
    length = tokens.shape[1]
    for depth in range(1, depths + 1):
        for sample, row in enumerate(tokens):
            for place in range(length):
                crosses = apart and bool((row[place : place + depth] == END).any())
                counts = place + depth < length and loss_mask[sample, place + depth] and not crosses
                assert masks[prediction_mask(depth)][sample, place] == float(counts)
        assert masks["predictable"][depth - 1] == masks[prediction_mask(depth)].sum()


def test_engines_packed_sequences_are_not_split() -> None:
    flags = "--context-parallel-size 2 --reset-attention-mask"
    with pytest.raises(ValueError, match="--reset-attention-mask: not with --context-parallel-size 2, because Transf"):
        checked_on(GPU, flags)
    checked_on(CPU, flags)


@pytest.mark.skipif(hasattr(GPTDatasetConfig, "inter_document_masking"), reason="this version has it")
def test_documents_of_files_need_a_newer_version() -> None:
    with pytest.raises(ValueError, match="does not have it; use --reset-attention-mask, or install a version"):
        parse("--mock-data --dataloader-inter-document-masking")
