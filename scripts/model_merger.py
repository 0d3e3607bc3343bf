"""verl's merger by its old name: `python scripts/model_merger.py merge|test ...` is `milepost merge|test ...`."""

from milepost.cli import main

if __name__ == "__main__":
    main()
