/* The verdict on an image in C with OpenVINO's C interface, which reads both kinds of export:
 *
 *   anomaly export --model runs/my_part --to openvino --pixels 1280x960 --output exported
 *   gcc -std=c11 examples/verdict.c -I$OV/include -L$OV/libs -lopenvino_c -o verdict
 *   ./verdict exported/model/whole.xml part.ppm
 *
 * $OV is as in verdict.cpp. The image is a PPM file (P6, 8 bits) of that size; a camera's bytes do
 * as well.
 */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <openvino/c/openvino.h>

static void check(ov_status_e status, const char *what) {
    if (status != OK) {
        fprintf(stderr, "error: %s: %s\n", what, ov_get_error_info(status));
        exit(1);
    }
}

static unsigned char *read_ppm(const char *file, int64_t shape[4]) {
    FILE *stream = fopen(file, "rb");
    unsigned width = 0, height = 0, white = 0;
    if (!stream || fscanf(stream, "P6 %u %u %u", &width, &height, &white) != 3 || white != 255) {
        fprintf(stderr, "error: %s isn't a PPM file of 8 bits (P6, 255)\n", file);
        exit(1);
    }
    fgetc(stream); /* the one character behind the header */
    size_t bytes = (size_t)width * height * 3;
    unsigned char *pixels = malloc(bytes);
    if (!pixels || fread(pixels, 1, bytes, stream) != bytes) {
        fprintf(stderr, "error: %s ends too early\n", file);
        exit(1);
    }
    fclose(stream);
    shape[0] = 1, shape[1] = height, shape[2] = width, shape[3] = 3;
    return pixels;
}

/* What an output holds. */
static void *values(ov_infer_request_t *request, const char *name, size_t *count) {
    ov_tensor_t *tensor = NULL;
    void *data = NULL;
    check(ov_infer_request_get_tensor(request, name, &tensor), name);
    check(ov_tensor_get_size(tensor, count), name);
    check(ov_tensor_data(tensor, &data), name);
    return data;
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: verdict whole.xml|whole.onnx image.ppm\n");
        return 2;
    }
    int64_t lengths[4];
    unsigned char *pixels = read_ppm(arguments[2], lengths);
    ov_core_t *core = NULL;
    ov_compiled_model_t *model = NULL;
    ov_infer_request_t *request = NULL;
    ov_shape_t shape;
    ov_tensor_t *input = NULL;
    check(ov_core_create(&core), "OpenVINO");
    /* Without the hint OpenVINO takes bfloat16 wherever the processor has it, and scores differ. */
    check(ov_core_compile_model_from_file(core, arguments[1], "CPU", 2, &model,
              ov_property_key_hint_inference_precision, "f32"), arguments[1]);
    check(ov_compiled_model_create_infer_request(model, &request), arguments[1]);
    check(ov_shape_create(4, lengths, &shape), "shape");
    check(ov_tensor_create_from_host_ptr(U8, shape, pixels, &input), "pixels");
    check(ov_infer_request_set_tensor(request, "pixels", input), "pixels");
    check(ov_infer_request_infer(request), arguments[2]);

    size_t size = 0;
    const char *verdicts[] = {"good", "review", "reject"};
    const char *verdict = verdicts[((int64_t *)values(request, "verdict", &size))[0]];
    int reason = (int)((int64_t *)values(request, "reason", &size))[0];
    float score = ((float *)values(request, "score", &size))[0];
    const float *map = values(request, "anomaly_map", &size);
    float highest = 0;
    for (size_t place = 0; place < size; ++place)
        highest = fmaxf(highest, map[place]); /* what isn't NaN */
    printf("%s %.6g %d %.6g\n", verdict, score, reason, highest);
    return 0;
}
