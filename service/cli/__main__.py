"""`python -m weightwire.service.cli`: the command where its script is not on the path."""

from weightwire.service.cli.main import main

if __name__ == "__main__":
    main()
