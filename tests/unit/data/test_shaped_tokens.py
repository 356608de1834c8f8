"""Formatting tokens are found in the text that the model wrote."""

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gtpo_megatron.batch import RolloutBatch, mask_of_lengths
from gtpo_megatron.branches import Branch
from gtpo_megatron.data.shaped_tokens import ShapedTokens, shaped_tokens_of
from recipes.tiny_cpu import ASSETS

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' tokenizer loading

PIECES = ["▁", "▁Final", "▁answer", ":", "▁4", "2", "Final", "a", "▁a", "<think>", "</think>", "x", "\n"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words that carry the space before them, as SentencePiece has them; a lone word decodes without it."""
    model = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="x"))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    model.decoder = decoders.Metaspace(prepend_scheme="always")
    model.add_special_tokens([AddedToken("<think>", special=True), AddedToken("</think>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=model, clean_up_tokenization_spaces=False)


def sampled(ids: torch.Tensor, lengths: torch.Tensor, branches: tuple[Branch, ...] = ()) -> RolloutBatch:
    return RolloutBatch(
        prompt_ids=torch.ones(len(ids), 1, dtype=torch.int64),
        prompt_lengths=torch.ones(len(ids), dtype=torch.int64),
        response_ids=ids,
        response_lengths=lengths,
        loss_mask=mask_of_lengths(lengths, ids.shape[1]),
        rollout_logprobs=torch.zeros(ids.shape),
        group_ids=torch.zeros(len(ids), dtype=torch.int64),
        truncated=torch.zeros(len(ids), dtype=torch.bool),
        policy_version=0,
        branches=(branches,) if branches else (),
    )


def test_a_match_is_within_a_sequence(tokenizer: PreTrainedTokenizerFast) -> None:
    """``answer :`` once more after ``Final``, and ``x :`` after the first ``answer``."""
    ids = torch.tensor([[PIECES.index(piece) for piece in ["▁Final", "▁answer", "▁answer", ":", "x", ":"]]])
    finder = ShapedTokens(tokenizer, ["Final answer:"])
    branches = (Branch(2, 1), Branch(4, 2))
    mask = finder.mask(sampled(ids, torch.tensor([6]), branches))[0]
    assert [place for place in range(6) if not mask[place]] == [0, 2, 3]
    assert [place for place in range(6) if not finder.mask(sampled(ids, torch.tensor([6])))[0][place]] == []


def shaped(tokenizer: PreTrainedTokenizerFast, patterns: list[str], *rows: list[str]) -> list[list[int]]:
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max()) + 1
    ids = torch.tensor([[PIECES.index(piece) for piece in row] + [0] * (width - len(row)) for row in rows])
    mask = ShapedTokens(tokenizer, patterns).mask(sampled(ids, lengths))
    assert mask[:, -1].all()  # padding
    return [[t for t in range(len(row)) if not mask[i, t]] for i, row in enumerate(rows)]


def test_words_with_their_spaces(tokenizer: PreTrainedTokenizerFast) -> None:
    row = ["▁a", "▁Final", "▁answer", ":", "▁4", "2"]
    assert shaped(tokenizer, ["Final answer:"], row, ["x"], row[3:]) == [[1, 2, 3], [], []]
    assert shaped(tokenizer, [" Final answer: "], row) == [[1, 2, 3, 4]]  # the token that holds the last space
    assert shaped(tokenizer, ["answer", "[0-9]+$"], row) == [[2, 4, 5]]


def test_special_tokens_and_several_matches(tokenizer: PreTrainedTokenizerFast) -> None:
    row = ["<think>", "x", "\n", "x", "</think>", "x", "<think>"]
    assert shaped(tokenizer, ["</?think>"], row) == [[0, 4, 6]]
    assert shaped(tokenizer, ["(?s)<think>.*</think>"], row) == [[0, 1, 2, 3, 4]]


def test_a_part_of_a_token_is_enough(tokenizer: PreTrainedTokenizerFast) -> None:
    assert shaped(tokenizer, ["nal ans"], ["Final", "▁answer", ":"]) == [[0, 1]]
    assert shaped(tokenizer, ["(?=a)"], ["Final", "▁answer"]) == [[]]  # matches that are empty


def test_the_tokens_of_a_byte_level_model() -> None:
    finder = shaped_tokens_of(str(ASSETS / "tiny_qwen2"), ["= 4"])
    ids = finder._tokenizer.encode("1 + 3 = 4 é", add_special_tokens=False)
    mask = finder.mask(sampled(torch.tensor([ids]), torch.tensor([len(ids)])))[0]
    chosen = finder._tokenizer.decode([token for token, keeps in zip(ids, mask.tolist(), strict=True) if not keeps])
    assert chosen.strip() == "= 4"
