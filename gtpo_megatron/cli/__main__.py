"""``python -m gtpo_megatron.cli``: the command if its script is not on the path, such as in a job."""

from gtpo_megatron.cli.dispatch import main

if __name__ == "__main__":
    main()
