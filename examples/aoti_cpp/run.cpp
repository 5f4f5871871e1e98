// Runs a package of `polymix export --target aoti` without Python: run model.pt2 2 256 64
// The input is 0, 0.001, 0.002 … in the given shape. Prints each output's shape, first value and sum.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/types.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

int main(int count, char** arguments) {
  if (count < 3) {
    std::cerr << "usage: run PACKAGE.pt2 SIZE [SIZE ...]\n";
    return 2;
  }
  try {
    std::vector<int64_t> shape;
    int64_t elements = 1;
    for (int place = 2; place < count; ++place) {
      shape.push_back(std::stoll(arguments[place]));
      elements *= shape.back();
    }
    torch::inductor::AOTIModelPackageLoader model(arguments[1]);
    at::Tensor x = (torch::arange(elements, torch::kFloat) * 0.001).reshape(shape);
    std::cout.precision(9);
    for (const at::Tensor& output : model.run({x})) {
      std::cout << output.sizes() << " " << output.flatten()[0].item<float>() << " "
                << output.sum(at::kDouble).item<double>() << "\n";
    }
  } catch (const std::exception& error) {
    std::cerr << "run: " << error.what() << "\n";
    return 1;
  }
}
