"""What a person is told when a run goes on: where, which steps again, and what keeps it from repeating to the bit."""

from gtpo_megatron.run_folder.checkpoints import Checkpoint
from gtpo_megatron.run_folder.folder import RunFolder
from gtpo_megatron.run_folder.manifest import RunFacts, check_model, layout_changes
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_what_there_is


def resume_notes(checkpoint: Checkpoint | None, facts: RunFacts, folder: RunFolder) -> list[str]:
    """Notes about resuming from this checkpoint, or from the start where there is none yet.

    Raises:
        CheckpointError: it is from another model.
    """
    metrics, first = folder.path / METRICS_FILE, checkpoint.state.step if checkpoint else 0
    rows, _ = read_what_there_is(metrics) if metrics.exists() else ([], "")
    last = max((row["step"] for row in rows), default=0)
    origin = f"the last checkpoint is of step {first}" if checkpoint else "there is no checkpoint yet"
    again = f"step {last}" if last == first + 1 else f"steps {first + 1} to {last}"
    notes = [f"{origin}: {again}, finished before, will be done again"] if last > first else []
    if checkpoint is None:
        return notes or [f"there is nothing to resume in {folder.path}: the run begins anew"]
    notes += [checkpoint.note] if checkpoint.note else []
    if folder.other_sums:
        notes.append(
            f"OTHER OPTIONS THAN AT THE LAST START ({', '.join(folder.other_sums)}): sums round in another order, so "
            f"the run is not equal to the last bit to one that was not resumed"
        )
    if checkpoint.manifest is None:
        return [*notes, f"{checkpoint.path} is taken as it is: neither its files nor its model are checked"]
    check_model(checkpoint.path, checkpoint.manifest, facts)
    changes = layout_changes(checkpoint.manifest, facts)
    if not changes:
        return notes
    return [
        *notes,
        f"ANOTHER LAYOUT ({', '.join(changes)}): weights, optimizer, schedule, sampler and counters go on; random "
        f"states start from the seed and sums round in another order, so the run is not equal to the last bit to one "
        f"that was not resumed",
    ]
