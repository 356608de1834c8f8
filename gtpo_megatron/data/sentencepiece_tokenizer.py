"""The tokenizer of a folder that has only sentencepiece's ``tokenizer.model``.

``AutoTokenizer`` would silently convert such a model to a tokenizer with other ids; this one encodes and decodes with
sentencepiece.
"""

from pathlib import Path

from sentencepiece import SentencePieceProcessor
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import read_json


class SentencePieceTokenizer(SentencePieceBackend):
    """Transformers' tokenizer with sentencepiece's decoding, which joins the bytes of unknown characters."""

    def _convert_id_to_token(self, index: int) -> str:
        """The piece of an id; empty for one that only pads the model's embedding, which a sampler may draw."""
        return self.sp_model.id_to_piece(index) if index < self.sp_model.get_piece_size() else ""

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Decodes pieces; special tokens, which sentencepiece omits, are inserted as text."""
        special, text, run = set(self.all_special_tokens), "", list[str]()
        for token in tokens:
            if not token:
                continue
            if token in special:
                text += self.sp_model.decode_pieces(run) + token
                run = []
            else:
                run.append(token)
        return text + str(self.sp_model.decode_pieces(run))


def load_sentencepiece(folder: Path, model_file: str) -> SentencePieceTokenizer:
    """Loads the tokenizer; special tokens of ``tokenizer_config.json`` override those of the model.

    Raises:
        OSError: the model cannot be read.
        RuntimeError: it is not a sentencepiece model.
        DataError: ``tokenizer_config.json`` is not a JSON object.
    """
    model = SentencePieceProcessor(model_file=str(folder / model_file))
    declared = {"unk": model.unk_id(), "bos": model.bos_id(), "eos": model.eos_id(), "pad": model.pad_id()}
    special = {f"{name}_token": model.id_to_piece(index) for name, index in declared.items() if index >= 0}
    config = folder / "tokenizer_config.json"
    if config.is_file():
        named = Fields(read_json(config), str(config))
        special = {key: piece for key, piece in special.items() if not named.raw.get(key)}
    tokenizer: SentencePieceTokenizer = SentencePieceTokenizer.from_pretrained(
        str(folder), local_files_only=True, **special
    )
    return tokenizer
