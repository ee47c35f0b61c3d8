// One step of a decoder, from rows to logits. Every parallel region consists of items whose results do not
// depend on the thread that computes them.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "experts.h"
#include "products.h"
#include "sample.h"
#include "team.h"

namespace ullage {
namespace ULLAGE_ISA {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rounds a row of `num_rows` rows, which are laid out as if they were alone, after the first `before` rows.
inline void round_any(const float* x, const Matrix& next, int64_t row, int64_t num_rows, const Model& model,
                      int64_t before = 0) {
  const auto round_rows = next.group == 16 ? round_row<16> : round_row<32>;
  const int64_t groups = before * (next.columns / next.group);
  round_rows(x, row, num_rows, next.columns, model.rounded + before * next.columns,
             model.row_scales + groups, model.row_sums + groups);
}

// Writes x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich, 2019).
inline void rms_norm(const float* x, const float* weight, int64_t columns, float eps, float* out) {
  F squares = zero();
  for (int64_t k = 0; k < columns; k += F::kWidth) {
    const F v = load(x + k);
    squares = fma(v, v, squares);
  }
  const F scale = set1(1.0f / std::sqrt(sum(squares) / columns + eps));
  for (int64_t k = 0; k < columns; k += F::kWidth) store(out + k, load(x + k) * scale * load(weight + k));
}

inline F silu(F x) { return x / (set1(1.0f) + exp(zero() - x)); }

// Writes silu(gate) * up for a row of [gate, up].
inline void gate_row(const float* gates, int64_t width, float* out) {
  for (int64_t k = 0; k < width; k += F::kWidth) store(out + k, silu(load(gates + k)) * load(gates + width + k));
}

class Stepper {
 public:
  Stepper(const Model& model, const Step& step, Team& team) : model_(model), step_(step), team_(team) {}

  // Numbers in a thread's workspace: a row, the scores of its experts, or the buffers of `attend`.
  static int64_t workspace_floats(const Model& model) {
    const int64_t group = model.num_heads / model.num_kv_heads, queries = rows_together(group) * group;
    const int64_t scores = model.num_experts ? 2 * model.num_experts + F::kWidth : 0;
    const int64_t row = std::max(model.hidden, std::max(model.intermediate, model.expert_width));
    return std::max(std::max(row, scores), queries * (kSpan + 4 + 3 * model.head_dim));
  }

  void run() {
    team_.begin();
    if (step_.embeds) embed();
    make_pieces();
    for (int64_t layer = step_.first_layer; layer < step_.end_layer; ++layer) run_layer(model_.layers[layer]);
    if (step_.num_sampled > 0) sample();
    team_.end();
  }

  // Writes x [num_rows, columns] times the matrix to out [num_rows, matrix rows].
  void multiply_any(const Matrix& matrix, const float* x, int64_t num_rows, float* out) {
    team_.begin();
    round_rows(x, matrix, num_rows);
    multiply_rows(matrix, num_rows, [&](int64_t row, int64_t column, const float* results) {
      put(out + row * matrix.rows + column, results);
    });
    team_.end();
  }

 private:
  static constexpr int64_t kRowBlock = 4 * kMostRows;  // rows whose inputs fit into a core's cache

  float* workspace(int thread) const { return model_.workspace + thread * model_.workspace_floats; }

  void embed() {
    const int64_t hidden = model_.hidden;
    team_.each(ceil_div(step_.num_rows, 16), [&](int64_t item, int) {
      const int64_t end = std::min(step_.num_rows, item * 16 + 16);
      for (int64_t row = item * 16; row < end; ++row) {
        read_row(model_.embedding, step_.token_ids[row], model_.hidden_rows + row * hidden);
      }
    });
  }

  void run_layer(const Layer& layer) {
    normalise(layer.mixer_norm, layer.mixer_in, step_.num_rows, [](int64_t row) { return row; });
    multiply(layer.mixer_in, [&](int64_t row, int64_t column, const float* results) {
      put(model_.wide_rows + row * layer.mixer_in.rows + column, results);
    });
    if (layer.taps != nullptr) {
      convolve(layer);
    } else {
      rotate_and_store(layer, layer.mixer_in.rows);
      attend(layer, layer.mixer_in.rows);
      round_rows(model_.attended, layer.mixer_out, step_.num_rows);
    }
    add_product(layer.mixer_out);
    if (layer.router != nullptr) return run_experts(layer);
    normalise(layer.mlp_norm, layer.gate_up, step_.num_rows, [](int64_t row) { return row; });
    multiply(layer.gate_up, [&](int64_t row, int64_t column, const float* results) {
      put(model_.wide_rows + row * layer.gate_up.rows + column, results);
    });
    gate(layer.down);
    add_product(layer.down);
  }

  static void put(float* out, const float* results) {
    static_assert(kTileRows == F::kWidth);
    store(out, load(results));
  }

  // Normalises rows of the hidden states into `attended` and rounds them for the next matrix.
  template <typename RowOf>
  void normalise(const float* weight, const Matrix& next, int64_t num_rows, const RowOf& row_of) {
    const int64_t hidden = model_.hidden, size = rows_an_item(num_rows, 8);
    team_.each(ceil_div(num_rows, size), [&](int64_t item, int) {
      const int64_t end = std::min(num_rows, (item + 1) * size);
      for (int64_t row = item * size; row < end; ++row) {
        float* out = model_.attended + row * hidden;
        const float* x = model_.hidden_rows + row_of(row) * hidden;
        rms_norm(x, weight, hidden, static_cast<float>(model_.eps), out);
        round_any(out, next, row, num_rows, model_);
      }
    });
  }

  int64_t rows_an_item(int64_t num_rows, int64_t most) const {
    return std::max<int64_t>(1, std::min(most, ceil_div(num_rows, 4 * team_.num_threads())));
  }

  void round_rows(const float* numbers, const Matrix& next, int64_t num_rows) {
    const int64_t size = rows_an_item(num_rows, 8);
    team_.each(ceil_div(num_rows, size), [&](int64_t item, int) {
      const int64_t end = std::min(num_rows, (item + 1) * size);
      for (int64_t row = item * size; row < end; ++row) round_any(numbers + row * next.columns, next, row, num_rows, model_);
    });
  }

  template <typename Put>
  void multiply(const Matrix& matrix, const Put& put_results) {
    multiply_rows(matrix, step_.num_rows, put_results);
  }

  // Items are blocks of rows times some tiles. There are a few for each thread, for every shape.
  template <typename Put>
  void multiply_rows(const Matrix& matrix, int64_t num_rows, const Put& put_results) {
    const Inputs in = {model_.rounded, model_.row_scales, model_.row_sums,
                       num_rows, matrix.columns, matrix.columns / matrix.group};
    const int64_t tiles = matrix.rows / kTileRows;
    const int64_t row_blocks = ceil_div(num_rows, kRowBlock);
    const int64_t wanted = ceil_div(8 * team_.num_threads(), row_blocks);
    const int64_t size = std::max<int64_t>(1, tiles / wanted), parts = ceil_div(tiles, size);
    team_.each(row_blocks * parts, [&](int64_t item, int) {
      const int64_t first = item / parts * kRowBlock, end = std::min(num_rows, first + kRowBlock);
      const int64_t last_tile = std::min(tiles, (item % parts + 1) * size);
      for (int64_t tile = item % parts * size; tile < last_tile; ++tile) {
        multiply_tile(matrix, tile, in, first, end, [&](int64_t row, const float* results) {
          put_results(row, tile * kTileRows, results);
        });
      }
    });
  }

  // hidden += matrix · rounded rows
  void add_product(const Matrix& matrix) {
    multiply(matrix, [&](int64_t row, int64_t column, const float* results) {
      float* out = model_.hidden_rows + row * model_.hidden + column;
      store(out, load(out) + load(results));
    });
  }

  // Gates rows of [gate, up] and rounds the results for the next matrix.
  void gate(const Matrix& next) {
    const int64_t width = model_.intermediate, size = rows_an_item(step_.num_rows, 8);
    team_.each(ceil_div(step_.num_rows, size), [&](int64_t item, int thread) {
      const int64_t end = std::min(step_.num_rows, (item + 1) * size);
      float* gated = workspace(thread);
      for (int64_t row = item * size; row < end; ++row) {
        gate_row(model_.wide_rows + row * 2 * width, width, gated);
        round_any(gated, next, row, step_.num_rows, model_);
      }
    });
  }

  const Chunk* chunk_of(int64_t row) const {
    return std::upper_bound(step_.chunks, step_.chunks + step_.num_chunks, row,
                            [](int64_t wanted, const Chunk& each) { return wanted < each.row; }) - 1;
  }

  void rotate_and_store(const Layer& layer, int64_t width) {
    const int64_t size = rows_an_item(step_.num_rows, 8);
    team_.each(ceil_div(step_.num_rows, size), [&](int64_t item, int) {
      const int64_t first = item * size, end = std::min(step_.num_rows, first + size);
      const Chunk* chunk = chunk_of(first);
      for (int64_t row = first; row < end; ++row) {
        while (row >= chunk->row + chunk->num_rows) ++chunk;
        const int64_t position = chunk->start + row - chunk->row;
        rotate_row(layer, model_.wide_rows + row * width, position);
        if (row < chunk->row + chunk->num_replayed) continue;
        store_row(layer, model_.wide_rows + row * width, position, chunk->blocks);
      }
    });
  }

  void rotate_row(const Layer& layer, float* row, int64_t position) {
    const int64_t heads = model_.num_heads, all = heads + model_.num_kv_heads, dim = model_.head_dim;
    const float *cos = model_.cos + position * dim / 2, *sin = model_.sin + position * dim / 2;
    const float eps = static_cast<float>(model_.eps);
    for (int64_t head = 0; head < all; ++head) {
      float* x = row + head * dim;
      const float* norm = head < heads ? layer.q_norm : layer.k_norm;
      if (norm != nullptr) rms_norm(x, norm, dim, eps, x);
      const F scale = set1(head < heads ? static_cast<float>(model_.query_scale) : 1.0f);
      for (int64_t k = 0; k < dim / 2; k += F::kWidth) {
        const F a = load(x + k), b = load(x + dim / 2 + k), c = load(cos + k), s = load(sin + k);
        store(x + k, (a * c - b * s) * scale);
        store(x + dim / 2 + k, fma(b, c, a * s) * scale);
      }
    }
  }

  Cache cache(const Layer& layer, int64_t kv_head) const {
    const int64_t itemsize = model_.cache_format == kFloat8 ? 1 : model_.cache_format == kBfloat16 ? 2 : 4;
    const int64_t block = kBlockTokens * model_.head_dim * itemsize;
    const int64_t head = model_.num_blocks * block, value_head = model_.num_kv_heads + kv_head;
    const bool is_scaled = model_.cache_format == kFloat8;
    return {layer.cache + kv_head * head, layer.cache + value_head * head, block,
            is_scaled ? kFloat8Unit * layer.kv_scales[kv_head] : 1.0f,
            is_scaled ? kFloat8Unit * layer.kv_scales[value_head] : 1.0f};
  }

  // Writes a row's keys and values to its place in the cache.
  void store_row(const Layer& layer, const float* row, int64_t position, const int32_t* blocks) {
    const int64_t dim = model_.head_dim, token = position % kBlockTokens;
    const int64_t offset = blocks[position / kBlockTokens];
    for (int64_t head = 0; head < model_.num_kv_heads; ++head) {
      const Cache place = cache(layer, head);
      const float* key = row + (model_.num_heads + head) * dim;
      const float* value = key + model_.num_kv_heads * dim;
      uint8_t* keys = const_cast<uint8_t*>(place.keys) + offset * place.block_size;
      uint8_t* values = const_cast<uint8_t*>(place.values) + offset * place.block_size;
      for (int64_t d = 0; d < dim; ++d) {
        if (model_.cache_format == kFloat8) {
          keys[d * kBlockTokens + token] = float_to_float8(key[d] * (kFloat8Unit / place.key_factor));
          values[token * dim + d] = float_to_float8(value[d] * (kFloat8Unit / place.value_factor));
        } else if (model_.cache_format == kBfloat16) {
          reinterpret_cast<uint16_t*>(keys)[d * kBlockTokens + token] = float_to_bfloat16(key[d]);
          reinterpret_cast<uint16_t*>(values)[token * dim + d] = float_to_bfloat16(value[d]);
        } else {
          reinterpret_cast<float*>(keys)[d * kBlockTokens + token] = key[d];
          reinterpret_cast<float*>(values)[token * dim + d] = value[d];
        }
      }
    }
  }

  // LFM2's gated short convolution of rows [B, C, u]: y_t = C_t · Σ_j taps_j (B·u)_{t-k+1+j}. The columns
  // before a chunk's first row are its state. Its last columns become the next state.
  void convolve(const Layer& layer) {
    const int64_t hidden = model_.hidden, size = rows_an_item(step_.num_rows, 8);
    const int64_t items = ceil_div(step_.num_rows, size);
    team_.each(items, [&](int64_t item, int) {
      const int64_t end = std::min(step_.num_rows, (item + 1) * size);
      for (int64_t row = item * size; row < end; ++row) {
        float* gates = model_.wide_rows + row * 3 * hidden;
        for (int64_t k = 0; k < hidden; k += F::kWidth) {
          store(gates + 2 * hidden + k, load(gates + k) * load(gates + 2 * hidden + k));
        }
        // Rounded like the state. Otherwise results would depend on the boundaries of chunks.
        if (model_.state_format == kBfloat16) {
          for (int64_t k = 2 * hidden; k < 3 * hidden; ++k) gates[k] = bfloat16_to_float(float_to_bfloat16(gates[k]));
        }
      }
    });
    // No step reads a state that it writes, so states are written in the same region.
    team_.each(items + step_.num_chunks, [&](int64_t item, int thread) {
      if (item >= items) return keep_state(layer, step_.chunks[item - items]);
      const int64_t first = item * size, end = std::min(step_.num_rows, first + size);
      const Chunk* chunk = chunk_of(first);
      for (int64_t row = first; row < end; ++row) {
        while (row >= chunk->row + chunk->num_rows) ++chunk;
        convolve_row(layer, *chunk, row, workspace(thread));
        round_any(workspace(thread), layer.mixer_out, row, step_.num_rows, model_);
      }
    });
  }

  void convolve_row(const Layer& layer, const Chunk& chunk, int64_t row, float* out) {
    const int64_t hidden = model_.hidden, kernel = model_.conv_kernel;
    for (int64_t k = 0; k < hidden; k += F::kWidth) store(out + k, zero());
    for (int64_t tap = 0; tap < kernel; ++tap) {
      const float* weights = layer.taps + tap * hidden;
      const int64_t source = row - chunk.row - (kernel - 1) + tap;  // of the chunk's columns
      if (source < 0 && chunk.state_slot < 0) continue;
      for (int64_t k = 0; k < hidden; k += F::kWidth) {
        const F column = source < 0 ? load_state(layer, chunk.state_slot, source + kernel - 1, k)
                                    : load(model_.wide_rows + ((chunk.row + source) * 3 + 2) * hidden + k);
        store(out + k, fma(column, load(weights + k), load(out + k)));
      }
    }
    const float* gates = model_.wide_rows + (row * 3 + 1) * hidden;
    for (int64_t k = 0; k < hidden; k += F::kWidth) store(out + k, load(out + k) * load(gates + k));
  }

  int64_t state_place(int64_t slot, int64_t column) const {
    return (slot * (model_.conv_kernel - 1) + column) * model_.hidden;
  }

  F load_state(const Layer& layer, int64_t slot, int64_t column, int64_t k) const {
    const int64_t place = state_place(slot, column) + k;
    if (model_.state_format == kBfloat16) return load_bfloat16(reinterpret_cast<const uint16_t*>(layer.states) + place);
    return load(reinterpret_cast<const float*>(layer.states) + place);
  }

  void keep_state(const Layer& layer, const Chunk& chunk) {
    const int64_t hidden = model_.hidden, columns = model_.conv_kernel - 1;
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t source = chunk.num_rows - columns + column, place = state_place(chunk.next_state_slot, column);
      alignas(64) float numbers[F::kWidth];
      for (int64_t k = 0; k < hidden; k += F::kWidth) {
        F kept = zero();
        if (source >= 0) kept = load(model_.wide_rows + ((chunk.row + source) * 3 + 2) * hidden + k);
        if (source < 0 && chunk.state_slot >= 0) kept = load_state(layer, chunk.state_slot, source + columns, k);
        if (model_.state_format == kFloat32) {
          store(reinterpret_cast<float*>(layer.states) + place + k, kept);
          continue;
        }
        store(numbers, kept);
        uint16_t* halves = reinterpret_cast<uint16_t*>(layer.states) + place + k;
        for (int i = 0; i < F::kWidth; ++i) halves[i] = float_to_bfloat16(numbers[i]);
      }
    }
  }

  void run_experts(const Layer& layer) {
    for (int64_t first = 0; first < step_.num_rows; first += model_.slice_rows) {
      run_experts(layer, first, std::min(model_.slice_rows, step_.num_rows - first));
    }
  }

  // Adds the experts' results for some rows to their hidden states, best expert first.
  void run_experts(const Layer& layer, int64_t first, int64_t num_rows) {
    const int64_t hidden = model_.hidden, width = model_.expert_width, each = model_.experts_per_token;
    Pairs pairs(model_.pairs, model_.slice_rows * each, model_.num_experts);
    const int64_t row_size = rows_an_item(num_rows, 8);
    team_.each(ceil_div(num_rows, row_size), [&](int64_t item, int thread) {
      const int64_t end = std::min(num_rows, (item + 1) * row_size);
      for (int64_t row = item * row_size; row < end; ++row) {
        float* normed = model_.attended + row * hidden;
        rms_norm(model_.hidden_rows + (first + row) * hidden, layer.mlp_norm, hidden, static_cast<float>(model_.eps), normed);
        choose_experts(model_, layer, normed, workspace(thread), pairs.chosen() + row * each, model_.expert_weights + row * each);
      }
    });
    pairs.sort(num_rows * each, kRowBlock);
    const int64_t count = num_rows * each, size = rows_an_item(count, 8);
    const auto round_pair = [&](const float* x, const Matrix& next, int64_t place) {
      const int64_t expert = pairs.chosen()[pairs.pair_at(place)], start = pairs.start(expert);
      round_any(x, next, place - start, pairs.end(expert) - start, model_, start);
    };
    team_.each(ceil_div(count, size), [&](int64_t item, int) {
      const int64_t end = std::min(count, (item + 1) * size);
      for (int64_t place = item * size; place < end; ++place) {
        round_pair(model_.attended + pairs.pair_at(place) / each * hidden, layer.gate_up, place);
      }
    });
    multiply_runs(layer.gate_up, pairs);
    team_.each(ceil_div(count, size), [&](int64_t item, int thread) {
      const int64_t end = std::min(count, (item + 1) * size);
      for (int64_t place = item * size; place < end; ++place) {
        gate_row(model_.wide_rows + place * 2 * width, width, workspace(thread));
        round_pair(workspace(thread), layer.down, place);
      }
    });
    multiply_runs(layer.down, pairs);
    team_.each(ceil_div(num_rows, row_size), [&](int64_t item, int) {
      const int64_t end = std::min(num_rows, (item + 1) * row_size);
      for (int64_t row = item * row_size; row < end; ++row) {
        float* out = model_.hidden_rows + (first + row) * hidden;
        for (int64_t k = 0; k < hidden; k += F::kWidth) {
          F total = zero();
          for (int64_t pair = row * each; pair < (row + 1) * each; ++pair) {
            const F result = load(model_.wide_rows + pairs.place_of(pair) * hidden + k);
            total = fma(result, set1(model_.expert_weights[pair]), total);
          }
          store(out + k, load(out + k) + total);
        }
      }
    });
  }

  // Multiplies the rounded rows of the sorted pairs by their experts' matrices, into `wide_rows`.
  void multiply_runs(const Matrix& all, const Pairs& pairs) {
    const int64_t rows = all.rows / model_.num_experts, tiles = rows / kTileRows, groups = all.columns / all.group;
    const int64_t wanted = ceil_div(8 * team_.num_threads(), pairs.num_blocks());
    const int64_t size = std::max<int64_t>(1, tiles / wanted), parts = ceil_div(tiles, size);
    team_.each(pairs.num_blocks() * parts, [&](int64_t item, int) {
      const Block& block = pairs.block(item / parts);
      const int64_t start = pairs.start(block.expert), num_rows = pairs.end(block.expert) - start;
      const Inputs in = {model_.rounded + start * all.columns, model_.row_scales + start * groups,
                         model_.row_sums + start * groups, num_rows, all.columns, groups};
      const int64_t end = std::min(tiles, (item % parts + 1) * size);
      for (int64_t tile = item % parts * size; tile < end; ++tile) {
        multiply_tile(all, block.expert * tiles + tile, in, block.start - start, block.end - start,
                      [&](int64_t row, const float* results) {
                        put(model_.wide_rows + (start + row) * rows + tile * kTileRows, results);
                      });
      }
    });
  }

  static int64_t rows_together(int64_t group) {
    return std::max<int64_t>(1, kRowsTogether * 4 / std::max<int64_t>(4, group));
  }

  // Divides the step's rows into pieces, which are rows of one chunk that are attended together. A piece
  // has `kRowsTogether` rows, fewer if many heads share keys, and at most as many as the largest chunk.
  void make_pieces() {
    const int64_t group = model_.num_heads / model_.num_kv_heads;
    int64_t largest = 1;
    for (int64_t i = 0; i < step_.num_chunks; ++i) largest = std::max(largest, step_.chunks[i].num_rows);
    piece_rows_ = std::min(largest, rows_together(group));
    for (int64_t i = 0; i < step_.num_chunks; ++i) {
      Chunk& chunk = step_.chunks[i];
      chunk.piece = num_pieces_;
      num_pieces_ += ceil_div(chunk.num_rows, piece_rows_);
      num_spans_ = std::max(num_spans_, ceil_div(chunk.start + chunk.num_rows, kSpan));
    }
  }

  void attend(const Layer& layer, int64_t width) {
    const int64_t kv_heads = model_.num_kv_heads, stride = piece_rows_ * (model_.num_heads / kv_heads);
    const int64_t units = num_pieces_ * kv_heads;
    const bool is_split = units < 4 * team_.num_threads() && num_spans_ > 1 &&
                          units * num_spans_ * stride * (model_.head_dim + 2) <= model_.num_partials;
    if (is_split) return attend_split(layer, width);
    team_.each(units, [&](int64_t item, int thread) {
      // The last chunks are the longest prompts, so they begin first.
      const Cache kv = cache(layer, item % kv_heads);
      Queries own = make_queries(num_pieces_ - 1 - item / kv_heads, item % kv_heads, kv, width, workspace(thread));
      float* scores = workspace(thread) + stride * model_.head_dim;
      Partial* parts = reinterpret_cast<Partial*>(scores + stride * kSpan);
      Partial* wholes = parts + stride;
      float* values = reinterpret_cast<float*>(wholes + stride);
      float* sums = values + stride * model_.head_dim;
      for (int r = 0; r < own.rows; ++r) wholes[r] = {-INFINITY, 0.0f};
      const int64_t num_spans = end_span(own);
      for (int64_t span = 0; span < num_spans; ++span) {
        attend_span(own, kv, model_.cache_format, span, scores, parts, values);
        for (int r = 0; r < own.rows; ++r) {
          merge(wholes[r], sums + r * own.head_dim, parts[r], values + r * own.head_dim, own.head_dim);
        }
      }
      for (int r = 0; r < own.rows; ++r) finish_row(own, kv, item % kv_heads, r, wholes[r], sums + r * own.head_dim);
    });
  }

  // For few sequences with long contexts: each span is an item, and the spans are merged afterwards.
  void attend_split(const Layer& layer, int64_t width) {
    const int64_t kv_heads = model_.num_kv_heads, units = num_pieces_ * kv_heads, spans = num_spans_;
    const int64_t stride = piece_rows_ * (model_.num_heads / kv_heads), dim = model_.head_dim;
    const auto place = [&](int64_t unit, int64_t span) {
      return model_.partials + (unit * spans + span) * stride * (dim + 2);
    };
    team_.each(units * spans, [&](int64_t item, int thread) {
      const int64_t unit = item / spans, span = item % spans;
      const Cache kv = cache(layer, unit % kv_heads);
      const Queries own = make_queries(unit / kv_heads, unit % kv_heads, kv, width, workspace(thread));
      if (span >= end_span(own)) return;
      float* out = place(unit, span);
      attend_span(own, kv, model_.cache_format, span,
                  workspace(thread) + stride * dim, reinterpret_cast<Partial*>(out), out + 2 * stride);
    });
    team_.each(units, [&](int64_t unit, int thread) {
      const Cache kv = cache(layer, unit % kv_heads);
      const Queries own = make_queries(unit / kv_heads, unit % kv_heads, kv, width, workspace(thread));
      float* sums = workspace(thread) + stride * dim;
      for (int r = 0; r < own.rows; ++r) {
        Partial whole = {-INFINITY, 0.0f};
        for (int64_t span = 0; span < end_span(own); ++span) {
          const float* from = place(unit, span);
          merge(whole, sums, reinterpret_cast<const Partial*>(from)[r], from + 2 * stride + r * dim, dim);
        }
        finish_row(own, kv, unit % kv_heads, r, whole, sums);
      }
    });
  }

  int64_t end_span(const Queries& own) const {
    return ceil_div(own.position + (own.rows - 1) / own.group + 1, kSpan);
  }

  // Collects the queries of a piece, rows of one chunk that are attended together, for one KV head.
  Queries make_queries(int64_t index, int64_t kv_head, const Cache& kv, int64_t width, float* queries) {
    const int64_t group = model_.num_heads / model_.num_kv_heads, dim = model_.head_dim;
    const Chunk* chunk = std::upper_bound(step_.chunks, step_.chunks + step_.num_chunks, index,
        [](int64_t piece, const Chunk& each) { return piece < each.piece; }) - 1;
    const int64_t first = (index - chunk->piece) * piece_rows_, rows = std::min(piece_rows_, chunk->num_rows - first);
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = model_.wide_rows + (chunk->row + first + row) * width + kv_head * group * dim;
      float* to = queries + row * group * dim;
      for (int64_t k = 0; k < group * dim; k += F::kWidth) store(to + k, load(from + k) * set1(kv.key_factor));
    }
    return {queries, static_cast<int>(rows * group), static_cast<int>(group), chunk->start + first,
            dim, chunk->blocks, chunk->row + first};
  }

  void finish_row(const Queries& own, const Cache& kv, int64_t kv_head, int r, Partial whole, const float* sums) {
    const int64_t head = kv_head * own.group + r % own.group;
    float* out = model_.attended + (own.row + r / own.group) * model_.num_heads * own.head_dim;
    finish(whole, sums, own.head_dim, kv.value_factor, out + head * own.head_dim);
  }

  void sample() {
    normalise(model_.norm, model_.head, step_.num_sampled, [&](int64_t row) { return step_.sampled_rows[row]; });
    const int64_t vocab = model_.vocab;
    multiply_rows(model_.head, step_.num_sampled,
                  [&](int64_t row, int64_t column, const float* results) {
                    put(step_.logits + row * vocab + column, results);
                  });
    team_.each(step_.num_sampled, [&](int64_t row, int) { step_.best[row] = likeliest(step_.logits + row * vocab, vocab); });
  }

  const Model& model_;
  const Step& step_;
  Team& team_;
  int64_t piece_rows_ = 1, num_pieces_ = 0, num_spans_ = 0;
};

}  // namespace ULLAGE_ISA
}  // namespace ullage
