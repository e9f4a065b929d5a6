// The verdict on an image in JavaScript: npm install onnxruntime-node
//
//   anomaly export --model runs/my_part --to onnx --pixels 1280x960 --output exported
//   node examples/verdict.js exported/model/whole.onnx part.ppm
//
// The image is a PPM file (P6, 8 bits) of that size; a camera's bytes do as well.

const fs = require("fs");
const ort = require("onnxruntime-node");

async function main(graph, image) {
  const content = fs.readFileSync(image);
  const header = /^P6\s+(\d+)\s+(\d+)\s+255\s/.exec(content.toString("latin1", 0, 64));
  if (!header) throw new Error(`${image} isn't a PPM file of 8 bits (P6, 255)`);
  const [width, height] = [Number(header[1]), Number(header[2])];
  const pixels = new Uint8Array(content.subarray(header[0].length));

  const session = await ort.InferenceSession.create(graph);
  const found = await session.run({
    pixels: new ort.Tensor("uint8", pixels, [1, height, width, 3]),
  });
  const verdict = ["good", "review", "reject"][Number(found.verdict.data[0])];
  const numbers = found.anomaly_map.data.filter((value) => !Number.isNaN(value));
  const highest = numbers.reduce((one, other) => Math.max(one, other));
  const score = found.score.data[0].toPrecision(6);
  console.log(`${verdict} ${score} ${found.reason.data[0]} ${highest.toPrecision(6)}`);
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(`error: ${error.message}`);
  process.exit(1);
});
