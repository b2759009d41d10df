"""Reward over steps, of one run or of several: `python plot.py build/train-demo-* -o reward.png`."""

import argparse
import json
from pathlib import Path


def plot(runs: dict[str, list[dict]], path: Path) -> None:
    """A line for each run, by its name; of a single one also what its rollouts did."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, steps in runs.items():
        at = [step["step"] for step in steps]
        axes.plot(at, [step["mean_reward"] for step in steps], marker="o", label=f"mean reward, {name}")
        if len(runs) == 1:
            axes.plot(at, [step["answered"] / step["rollouts"] for step in steps], "--", label="wrote an answer")
            axes.plot(at, [step["right"] / step["rollouts"] for step in steps], ":", label="was right")
    axes.set(xlabel="step", ylim=(0, 1), title="GRPO, SmolLM2-135M on two CPU cores")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="what train.py made")
    parser.add_argument("-o", "--output", type=Path, default=Path("reward.png"))
    options = parser.parse_args()
    plot({each.name: json.loads((each / "steps.json").read_text()) for each in options.folders}, options.output)


if __name__ == "__main__":
    main()
