"""``python -m gtpo_megatron.cli``: the command where its script is not on the path, such as inside a job."""

from gtpo_megatron.cli.dispatch import main

if __name__ == "__main__":
    main()
