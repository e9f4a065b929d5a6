// The patch scores of an image by an exported model, in C++ with OpenVINO, which reads both kinds
// of export:
//
//   anomaly export --model runs/my_part --to openvino --whole --output exported
//   g++ -std=c++17 examples/patch_scores.cpp -I$OV/include -L$OV/libs -lopenvino -o patch_scores
//   ./patch_scores exported/model/whole.xml part.ppm
//
// $OV is an OpenVINO archive's folder "runtime", or what `pip install openvino` has installed: the
// folder of the Python package, whose library is libs/libopenvino.so.NNNN, to be named in the place
// of -lopenvino.
//
// The image is a PPM file (P6, 8 bits) of the network's size: what `anomaly` makes of a file before
// the network sees it is decoding, resizing as `image` in config.yaml says, and dividing by 255.
// Batches are images one after the other; height and width are free where the model takes several.

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <openvino/openvino.hpp>

// The next number of a header, in which comments may stand.
static std::size_t read_number(std::istream& stream) {
    std::size_t number = 0;
    while ((stream >> std::ws).peek() == '#')
        stream.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
    stream >> number;
    return number;
}

// (1, 3, H, W) float32, RGB in [0, 1].
static ov::Tensor read_ppm(const std::string& file) {
    std::ifstream stream(file, std::ios::binary);
    std::string magic;
    stream >> magic;
    const std::size_t width = read_number(stream), height = read_number(stream);
    const std::size_t white = read_number(stream);
    stream.get();  // the one character behind the header
    if (!stream || magic != "P6" || white != 255)
        throw std::runtime_error(file + " isn't a PPM file of 8 bits (P6, 255)");
    std::vector<unsigned char> pixels(3 * width * height);
    stream.read(reinterpret_cast<char*>(pixels.data()), static_cast<std::streamsize>(pixels.size()));
    if (!stream)
        throw std::runtime_error(file + " ends too early");

    ov::Tensor images(ov::element::f32, {1, 3, height, width});
    float* values = images.data<float>();
    for (std::size_t place = 0; place < width * height; ++place)
        for (std::size_t colour = 0; colour < 3; ++colour)
            values[colour * width * height + place] = pixels[3 * place + colour] / 255.0f;
    return images;
}

static void print_scores(const ov::Tensor& scores) {
    const float* values = scores.data<const float>();
    const std::size_t rows = scores.get_shape()[1], columns = scores.get_shape()[2];
    for (std::size_t row = 0; row < rows; ++row)
        for (std::size_t column = 0; column < columns; ++column)
            std::printf("%.6g%c", values[row * columns + column], column + 1 < columns ? ' ' : '\n');
    std::printf("highest: %.6g\n", *std::max_element(values, values + rows * columns));
}

int main(int count, char** arguments) {
    if (count != 3) {
        std::fprintf(stderr, "usage: patch_scores whole.xml|whole.onnx image.ppm\n");
        return 2;
    }
    try {
        ov::Core core;
        // Without the hint OpenVINO takes bfloat16 wherever the processor has it, and scores differ.
        auto model = core.compile_model(
            arguments[1], "CPU", ov::hint::inference_precision(ov::element::f32));
        auto request = model.create_infer_request();
        request.set_tensor("images", read_ppm(arguments[2]));
        request.infer();
        print_scores(request.get_tensor("patch_scores"));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
    return 0;
}
