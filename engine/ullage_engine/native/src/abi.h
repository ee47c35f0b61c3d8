// The data that Python and the library share. `ullage_engine.native.library` mirrors it field by
// field. Every number is 64 bits wide, so that padding does not depend on a compiler.
#pragma once
#include <cstdint>

extern "C" {

enum Format : int64_t { kInt4 = 1, kInt8 = 2, kBfloat16 = 3, kFloat32 = 4, kFloat8 = 5 };

// A weight matrix [rows, columns], int4 or int8, in tiles of 16 rows. A tile has the codes of each group
// of columns, then 16 scales and 16 offsets in float16. In int4, weight = code * scale + offset. In int8,
// weight = (code - 128) * scale + offset.
struct Matrix {
  const uint8_t* data;
  int64_t rows, columns, format, group;
};

// A layer with `taps` is a convolution, and any other is attention. Its feed-forward part has experts if
// there is a `router`, and is dense otherwise.
struct Layer {
  const float *mixer_norm, *mlp_norm;
  const float *q_norm, *k_norm;        // of each head, null if heads are not normalised
  const float* taps;                   // [conv_kernel, hidden], the oldest first
  const float *router, *router_bias;   // [experts, hidden] and [experts]
  Matrix mixer_in, mixer_out;          // mixer_in: queries, keys and values, or a convolution's B, C and u
  Matrix gate_up, down;                // with experts, the stacked matrices of all experts
  uint8_t* cache;   // [2 * kv_heads, blocks, block_tokens * head_dim], keys first
  const float* kv_scales;  // [2 * kv_heads]: the value of a stored 1 in kFloat8, a power of two
  uint8_t* states;  // [slots, conv_kernel - 1, hidden], the oldest column first
};

struct Model {
  int64_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab;
  int64_t num_blocks, cache_format;  // kBfloat16, kFloat32, or kFloat8: E4M3
  int64_t state_format;              // kBfloat16 or kFloat32
  int64_t conv_kernel;
  int64_t num_experts, experts_per_token, expert_width;
  int64_t slice_rows;    // most rows whose experts are computed together
  int64_t is_normalised; // whether expert weights, which are sigmoids, are divided by their sum
  double expert_scale;   // times each weight
  double eps, query_scale;
  const float *cos, *sin;  // [positions, head_dim / 2]
  const float* norm;
  Matrix embedding, head;
  const Layer* layers;
  // Buffers for the largest step, each row by row.
  float *hidden_rows, *wide_rows, *attended, *expert_weights;
  int32_t* pairs;       // pairs of tokens and experts, see experts.h
  int8_t* rounded;
  float *row_scales, *row_sums;
  float* partials;      // results of the spans of decodes that several threads share
  int64_t num_partials;
  float* workspace;     // of each thread, `workspace_floats`
  int64_t workspace_floats;
};

// Consecutive tokens of one sequence: the step's rows from `row` on, at positions from `start` on.
struct Chunk {
  int64_t row, num_rows, start;
  int64_t num_replayed;                 // number of first rows whose keys and values are already stored
  int64_t state_slot, next_state_slot;  // of the convolutions, -1 without a state before the first row
  const int32_t* blocks;
  int64_t piece;  // index of the chunk's first piece of attention, written by the library
};

struct Step {
  int64_t num_rows, num_chunks, num_sampled, first_layer, end_layer;
  int64_t embeds;  // whether hidden_rows are computed from token_ids instead of given
  const int32_t *token_ids, *sampled_rows;
  Chunk* chunks;
  float* logits;   // [num_sampled, vocab]
  int32_t* best;   // [num_sampled]: the likeliest token, the first of equals, or -1 if not all are finite
};

// How a token is chosen from a row of logits.
struct Draw {
  double temperature, top_p, min_p;
  double noise;   // in (0, 1): the place of the token in the cumulative sum of probabilities
  int64_t top_k;  // 0 for no limit
  int64_t token;  // the result: a token or a `Refusal`
};

enum Refusal : int64_t { kNothingAllowed = -1, kNoMemory = -2 };

}  // extern "C"
