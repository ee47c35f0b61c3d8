// The kernels for one instruction set: compiled once for each with ULLAGE_ISA, its name.
#include "step.h"

namespace ullage {
namespace ULLAGE_ISA {

void run(const Model& model, const Step& step, Team& team) { Stepper(model, step, team).run(); }

void multiply(const Matrix& matrix, const float* x, int64_t num_rows, float* out, const Model& buffers, Team& team) {
  Stepper(buffers, Step{}, team).multiply_any(matrix, x, num_rows, out);
}

}  // namespace ULLAGE_ISA
}  // namespace ullage
