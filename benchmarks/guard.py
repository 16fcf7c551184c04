"""A guard against losing speed: two workloads, with generous margins.

    python -m benchmarks.guard

Steps of plain and of private training are made in turn, each in a process of
its own. The limits are far below the speeds that the README names, as other
work on the machine may meet the one more than the other; what fails is
measured a second time before it counts.
"""

import sys

from benchmarks.compare import PLAIN, compare

LEAST_SPEEDS = {"mlp": 0.45, "lstm": 0.5}
STEPS, SECONDS = 15, 10


def main():
    failed = False
    for name, least in LEAST_SPEEDS.items():
        for _ in range(2):
            found = compare(name, [PLAIN, "auto"], STEPS, SECONDS, print)
            speed = found[PLAIN][0] / found["auto"][0]
            enough = speed >= least
            print(
                f"{name}: {speed:.2f} of the speed of plain training, "
                f"at least {least} {'reached' if enough else 'MISSED'}"
            )
            if enough:
                break
        failed |= not enough
    sys.exit(failed)


if __name__ == "__main__":
    main()
