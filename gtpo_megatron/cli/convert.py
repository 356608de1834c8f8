"""``gtpo-megatron convert``: Hugging Face folders, Megatron checkpoints and GGUF files; docs/conversion.md."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import PositiveInt
from rich.console import Console
from rich.logging import RichHandler

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.command import Command
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.sentence import print_sentence

DESCRIPTION = (
    "Converts models between Hugging Face folders and Megatron checkpoints, adapters to peft's, GGUF files to folders; "
    "docs/conversion.md shows how."
)


@configuration
class HFToMegatron:
    """Makes a folder that the trainer can start from: a Megatron checkpoint with configuration and tokenizer.

    Attributes:
        src: folder in Hugging Face format, with safetensors, or a model's name on the hub.
        dst: folder to make; must not exist, or be empty.
        tensor_parallel_size: tensor ranks that will load it; any other layout can load it too.
        pipeline_parallel_size: pipeline ranks, likewise.
        expert_parallel_size: expert ranks, likewise.
        expert_tensor_parallel_size: tensor ranks of an expert, likewise.
    """

    src: tyro.conf.Positional[Path]
    dst: tyro.conf.Positional[Path]
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    expert_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = 1

    def _parallel(self) -> ParallelConfig:
        tensor, expert = self.tensor_parallel_size, self.expert_parallel_size * self.expert_tensor_parallel_size
        return ParallelConfig(
            num_ranks=math.lcm(tensor, expert) * self.pipeline_parallel_size,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=self.pipeline_parallel_size,
            sequence_parallel=tensor > 1,
            expert_parallel_size=self.expert_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
        )

    def run(self, console: Console) -> None:
        """Converts."""
        from gtpo_megatron.cli.conversion import progress_bar
        from gtpo_megatron.weights.conversion import hf_to_megatron  # takes seconds, so options are parsed first

        with progress_bar(console) as bar:
            hf_to_megatron(_folder(self.src), self.dst, self._parallel(), progress=bar)


@configuration
class MegatronToHF:
    """Makes a folder in Hugging Face format.

    Attributes:
        src: a converted folder, a run's folder (its latest checkpoint) or one checkpoint of a run.
        dst: folder to make; must not exist, or be empty.
        shard_mib: size of the largest safetensors file.
        model: folder that config.json and tokenizer are taken from; by default the converted folder itself, or the
            ``model.path`` of the run.
        verify: check the checkpoint's files against its manifest first; a converted folder has none.
    """

    src: tyro.conf.Positional[Path]
    dst: tyro.conf.Positional[Path]
    shard_mib: PositiveInt = 5120
    model: Path | None = None
    verify: bool = True

    def run(self, console: Console) -> None:
        """Converts."""
        from gtpo_megatron.cli.conversion import find_checkpoint, progress_bar
        from gtpo_megatron.weights.conversion import megatron_to_hf
        from gtpo_megatron.weights.megatron.checkpoint_files import Verify

        verify: Verify = "full" if self.verify else "none"
        checkpoint, model = find_checkpoint(self.src, self.model, verify)
        with progress_bar(console) as bar:
            megatron_to_hf(checkpoint, model, self.dst, progress=bar, shard_bytes=self.shard_mib << 20, verify=verify)


@configuration
class MegatronToPeft:
    """Makes a folder in peft's format of the adapters that a run trained.

    Attributes:
        src: a run's folder (its latest checkpoint) or one checkpoint of a run.
        dst: folder to make; must not exist, or be empty.
        model: folder of the weights that the adapters were trained over; by default the ``model.path`` of the run.
        verify: check the checkpoint's files against its manifest first.
    """

    src: tyro.conf.Positional[Path]
    dst: tyro.conf.Positional[Path]
    model: Path | None = None
    verify: bool = True

    def run(self, console: Console) -> None:
        """Converts."""
        from gtpo_megatron.cli.conversion import find_checkpoint
        from gtpo_megatron.weights.conversion import megatron_to_peft
        from gtpo_megatron.weights.megatron.checkpoint_files import Verify

        del console  # they are small
        verify: Verify = "full" if self.verify else "none"
        checkpoint, model = find_checkpoint(self.src, self.model, verify)
        megatron_to_peft(checkpoint, model, self.dst, verify=verify)


@configuration
class GGUFToHF:
    """Makes a folder in Hugging Face format of a GGUF file; needs the extra gguf.

    Attributes:
        src: GGUF file of a dense Llama, Qwen2 or Qwen3.
        dst: folder to make; must not exist, or be empty.
        dtype: dtype of the weights; float32 has exactly the values that the file stands for.
    """

    src: tyro.conf.Positional[Path]
    dst: tyro.conf.Positional[Path]
    dtype: Literal["float32", "bfloat16"] = "float32"

    def run(self, console: Console) -> None:
        """Converts."""
        from gtpo_megatron.cli.conversion import progress_bar
        from gtpo_megatron.weights.gguf.conversion import gguf_to_hf

        with progress_bar(console) as bar:
            cost = gguf_to_hf(self.src, self.dst, dtype=self.dtype, progress=bar)
        print_sentence(console, cost)


@configuration
class Dequantize:
    """Makes a folder in Hugging Face format of one with quantized weights; training reads these without it.

    Attributes:
        src: folder with weights of FP8, MXFP4, or compressed-tensors' integers, or its name on the hub.
        dst: folder to make, of bfloat16; must not exist, or be empty.
        shard_mib: size of the largest safetensors file.
    """

    src: tyro.conf.Positional[Path]
    dst: tyro.conf.Positional[Path]
    shard_mib: PositiveInt = 5120

    def run(self, console: Console) -> None:
        """Converts."""
        from gtpo_megatron.cli.conversion import progress_bar
        from gtpo_megatron.weights.conversion import dequantize

        with progress_bar(console) as bar:
            dequantize(_folder(self.src), self.dst, progress=bar, shard_bytes=self.shard_mib << 20)


Conversion = (
    Annotated[HFToMegatron, tyro.conf.subcommand("hf-to-megatron")]
    | Annotated[MegatronToHF, tyro.conf.subcommand("megatron-to-hf")]
    | Annotated[MegatronToPeft, tyro.conf.subcommand("megatron-to-peft")]
    | Annotated[GGUFToHF, tyro.conf.subcommand("gguf-to-hf")]
    | Annotated[Dequantize, tyro.conf.subcommand("dequantize")]
)


def run(arguments: Sequence[str]) -> int:
    """``convert KIND SRC DST``."""
    conversion: HFToMegatron | MegatronToHF | MegatronToPeft | GGUFToHF | Dequantize = parse_options(
        Conversion,  # type: ignore[arg-type]  # a union, of which tyro makes subcommands
        arguments,
        program="gtpo-megatron convert",
        description=DESCRIPTION,
    )
    console = Console(stderr=True)
    show_warnings(console)
    convert(conversion, console)
    return 0


def convert(conversion: HFToMegatron | MegatronToHF | MegatronToPeft | GGUFToHF | Dequantize, console: Console) -> None:
    """Converts with a progress bar, and says where the result is.

    Raises:
        GTPOError: the source cannot be used, or the destination cannot be written.
    """
    conversion.run(console)
    print_sentence(console, f"{conversion.dst} is written")


def _folder(source: Path) -> Path:
    """The folder of a model of the hub, downloaded if need be; any other path as it is."""
    from gtpo_megatron.orchestration.model_folder import model_folder

    return model_folder(str(source)) or source


def show_warnings(console: Console) -> None:
    """Shows what the conversion logs above the bar."""
    handler = RichHandler(console=console, show_time=False, show_path=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])


COMMAND = Command(
    usage="""\
  convert hf-to-megatron SRC DST [--tensor-parallel-size N] [...]
  convert megatron-to-hf SRC DST [--shard-mib N] [--model DIR] [--no-verify]
                    between Hugging Face folders and Megatron checkpoints; SRC of the
                    second may be a run's folder or one checkpoint of it; adapters are merged
  convert megatron-to-peft SRC DST [--model DIR] [--no-verify]
                    a folder in peft's format of the adapters of a run
  convert gguf-to-hf FILE DST [--dtype float32|bfloat16]
                    a Hugging Face folder of a GGUF file: its rounded weights
  convert dequantize SRC DST [--shard-mib N]
                    a folder of bfloat16 of one in FP8, MXFP4 or INT4""",
    run=run,
    options=Conversion,
)
