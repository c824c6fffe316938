"""`python -m experiments.spec.departures`: all of them."""

from experiments.spec.departures import divide_factor, smaller_groups, unused


def main() -> None:
    """Print each case as it ends."""
    for module in (smaller_groups, divide_factor, unused):
        print(module.departure(), flush=True)


if __name__ == "__main__":
    main()
