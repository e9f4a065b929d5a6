"""The verdict on an image without anomaly: numpy and ONNX Runtime.

anomaly export --model runs/my_part --to onnx --pixels 1280x960 --output exported
python examples/verdict.py exported/model/whole.onnx part.ppm

The image is a PPM file (P6, 8 bits) of that size; a camera's bytes do as well.
"""

import re
import sys
from pathlib import Path

import numpy as np
import onnxruntime

graph, image = sys.argv[1:]
content = Path(image).read_bytes()
header = re.match(rb"P6\s+(\d+)\s+(\d+)\s+255\s", content)
if header is None:
    sys.exit(f"{image} isn't a PPM file of 8 bits (P6, 255)")
width, height = map(int, header.groups())
pixels = np.frombuffer(content, np.uint8, offset=header.end()).reshape(1, height, width, 3)

session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
names = [output.name for output in session.get_outputs()]
found = dict(zip(names, session.run(None, {"pixels": pixels}), strict=True))
verdict = ("good", "review", "reject")[found["verdict"][0]]
print(
    f"{verdict} {found['score'][0]:.6g} {found['reason'][0]} {np.nanmax(found['anomaly_map']):.6g}"
)
