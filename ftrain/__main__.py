"""python -m ftrain, the same as the command ftrain."""

from ftrain.cli import main

if __name__ == "__main__":
    main()
