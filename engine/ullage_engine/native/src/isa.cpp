// The kernels for one instruction set. This file is compiled once for each, with its name as ULLAGE_ISA.
// All give the same bits, see vector.h.
#include "step.h"

namespace ullage {
namespace ULLAGE_ISA {

bool run(const Model& model, const Step& step, Team& team) {
  if (model.workspace_floats < Stepper::workspace_floats(model)) return false;
  Stepper(model, step, team).run();
  return true;
}

void multiply(const Matrix& matrix, const float* x, int64_t num_rows, float* out, const Model& buffers, Team& team) {
  Stepper(buffers, Step{}, team).multiply_any(matrix, x, num_rows, out);
}

void sample(const float* logits, int64_t vocab, Draw* draws, int64_t num_rows, Team& team) {
  if (num_rows > 1) team.begin();
  team.each(num_rows, [&](int64_t row, int) { draws[row].token = choose(logits + row * vocab, vocab, draws[row]); });
  team.end();
}

void weigh_rows(const float* logits, int64_t vocab, int64_t num_rows, float* log_masses, Team& team) {
  if (num_rows > 1) team.begin();
  team.each(num_rows, [&](int64_t row, int) { log_masses[row] = log_mass(logits + row * vocab, vocab); });
  team.end();
}

}  // namespace ULLAGE_ISA
}  // namespace ullage
