// The verdict on an image in C++ with OpenVINO, which reads both kinds of export:
//
//   anomaly export --model runs/my_part --to openvino --pixels 1280x960 --output exported
//   g++ -std=c++17 examples/verdict.cpp -I$OV/include -L$OV/libs -lopenvino -o verdict
//   ./verdict exported/model/whole.xml part.ppm
//
// $OV is an OpenVINO archive's folder "runtime", or what `pip install openvino` has installed: the
// folder of the Python package, whose library is libs/libopenvino.so.NNNN, to be named in the place
// of -lopenvino.
//
// The image is a PPM file (P6, 8 bits) of that size; a camera's bytes do as well.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>

#include <openvino/openvino.hpp>

static ov::Tensor read_ppm(const std::string& file) {
    std::ifstream stream(file, std::ios::binary);
    std::string magic;
    std::size_t width = 0, height = 0, white = 0;
    stream >> magic >> width >> height >> white;
    stream.get();  // the one character behind the header
    if (!stream || magic != "P6" || white != 255)
        throw std::runtime_error(file + " isn't a PPM file of 8 bits (P6, 255)");
    ov::Tensor pixels(ov::element::u8, {1, height, width, 3});
    stream.read(static_cast<char*>(pixels.data()), static_cast<std::streamsize>(pixels.get_size()));
    if (!stream)
        throw std::runtime_error(file + " ends too early");
    return pixels;
}

int main(int count, char** arguments) {
    if (count != 3) {
        std::fprintf(stderr, "usage: verdict whole.xml|whole.onnx image.ppm\n");
        return 2;
    }
    try {
        ov::Core core;
        // Without the hint OpenVINO takes bfloat16 wherever the processor has it, and scores differ.
        auto model = core.compile_model(
            arguments[1], "CPU", ov::hint::inference_precision(ov::element::f32));
        auto request = model.create_infer_request();
        request.set_tensor("pixels", read_ppm(arguments[2]));
        request.infer();
        const ov::Tensor map = request.get_tensor("anomaly_map");
        float highest = 0;
        for (std::size_t place = 0; place < map.get_size(); ++place)
            highest = std::fmax(highest, map.data<const float>()[place]);  // what isn't NaN
        const char* verdicts[] = {"good", "review", "reject"};
        std::printf("%s %.6g %d %.6g\n",
            verdicts[request.get_tensor("verdict").data<const std::int64_t>()[0]],
            request.get_tensor("score").data<const float>()[0],
            static_cast<int>(request.get_tensor("reason").data<const std::int64_t>()[0]), highest);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
    return 0;
}
