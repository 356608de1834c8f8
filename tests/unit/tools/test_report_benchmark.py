from benchmarks.report import Options, write_run
from gtpo_megatron.run_folder.rollout_log import rollout_files


def test_a_run_of_few_steps_has_a_file_of_groups_for_each(tmp_path):
    write_run(tmp_path, Options(steps=3, groups=64, group_size=2, response_tokens=8))
    assert [step for step, _ in rollout_files(tmp_path)] == [1, 2, 3]
