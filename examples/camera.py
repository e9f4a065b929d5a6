"""A camera above a line: each frame gets a verdict, and what isn't good is kept as a picture.

python examples/camera.py                                    # a generated video, as a trial
python examples/camera.py --model runs/my_part --source 0    # the first camera
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import cv2

import anomaly
from anomaly.desk.demo import write_sample_data


def inspect(detector: anomaly.Detector, source: int | str, kept: Path) -> Counter[str]:
    """Judge every frame until the source ends or Ctrl-C is pressed; counts by verdict."""
    camera = cv2.VideoCapture(source)
    if not camera.isOpened():
        raise SystemExit(f"no camera or video at {source!r}")
    camera.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # the newest frame, not one that has waited
    kept.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    begun = time.perf_counter()
    try:
        while True:
            there, frame = camera.read()
            if not there:
                break
            prediction = detector.predict(anomaly.image(frame, channels="bgr"))  # as OpenCV has it
            number = counts.total()
            counts[prediction.verdict] += 1
            if prediction.verdict != "good":
                picture = cv2.cvtColor(prediction.heatmap(), cv2.COLOR_RGB2BGR)
                cv2.imwrite(str(kept / f"{number:06}_{prediction.verdict}.png"), picture)
            print(f"{number:6}  {prediction.verdict:6}  {prediction.score:.4g}")
    except KeyboardInterrupt:
        pass
    finally:
        camera.release()
    rate = counts.total() / (time.perf_counter() - begun)
    print(f"{dict(counts)}, {rate:.1f} frames a second, pictures in {kept}")
    return counts


def trial(folder: Path) -> tuple[anomaly.Detector, str]:
    """A model of generated plates, and a video of good ones and scratched ones."""
    plates = folder / "plates"
    write_sample_data(plates, n_train=12, n_good=4, n_defect=5)
    settings = {"backbone": {"name": "timm/tf_efficientnet_lite2"}, "image": {"area": 128}}
    detector = anomaly.fit(plates / "train" / "good", settings)
    video = folder / "line.avi"
    frames = [*sorted((plates / "test" / "good").iterdir()),
              *sorted((plates / "test" / "edge_nick").iterdir())]  # fmt: skip
    size = cv2.imread(str(frames[0])).shape
    writer = cv2.VideoWriter(str(video), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (size[1], size[0]))
    for frame in frames:
        writer.write(cv2.imread(str(frame)))
    writer.release()
    return detector, str(video)


def main(arguments: list[str] | None = None) -> Counter[str]:
    """Read the options and look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model or a run of `anomaly train`")
    parser.add_argument("--source", default="0", help="a camera's number, or a video's path")
    parser.add_argument("--output", type=Path, default=Path("camera"), help="for pictures")
    options = parser.parse_args(arguments)
    if options.model is None:
        detector, source = trial(options.output / "trial")
    else:
        detector, source = anomaly.load(options.model), options.source
    return inspect(detector, int(source) if source.isdigit() else source, options.output / "kept")


if __name__ == "__main__":
    try:
        main()
    except anomaly.AnomalyError as error:  # what a person can mend is no traceback
        raise SystemExit(f"error: {error}") from None
