"""`python -m trl_darts.cli`, where the `trl-darts` script is not on the path."""

from . import main


if __name__ == "__main__":
    main()
