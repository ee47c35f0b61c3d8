// The data that Python and the library share. `ullage_engine.native.library` mirrors it field
// by field; every number is 64 bits wide so that no padding depends on a compiler.
#pragma once
#include <cstdint>

extern "C" {

enum Format : int64_t { kInt4 = 1, kInt8 = 2, kBfloat16 = 3, kFloat32 = 4, kFloat8 = 5 };

// A weight matrix [rows, columns], int4 or int8, in tiles of 16 rows: for each group of columns the
// codes, then 16 scales and 16 offsets in float16; weight = code * scale + offset, for codes from 0 on
// of int4 and less 128 of int8.
struct Matrix {
  const uint8_t* data;
  int64_t rows, columns, format, group;
};

// A layer attends, or has `taps` and convolves; its feed-forward is dense, or has a `router`.
struct Layer {
  const float *mixer_norm, *mlp_norm;
  const float *q_norm, *k_norm;        // of each head; null where heads are not normalised
  const float* taps;                   // [conv_kernel, hidden], the oldest first
  const float *router, *router_bias;   // [experts, hidden] and [experts]
  Matrix mixer_in, mixer_out;          // of queries, keys and values; of a convolution's B, C and u
  Matrix gate_up, down;                // of experts, those of all, one above the other
  uint8_t* cache;   // [2 * kv_heads, blocks, block_tokens * head_dim], keys first
  const float* kv_scales;  // [2 * kv_heads]: what a stored 1 of kFloat8 stands for, a power of two
  uint8_t* states;  // [slots, conv_kernel - 1, hidden], the oldest column first
};

struct Model {
  int64_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab;
  int64_t num_blocks, cache_format;  // kBfloat16, kFloat32, or kFloat8: E4M3
  int64_t state_format;              // kBfloat16 or kFloat32
  int64_t conv_kernel;
  int64_t num_experts, experts_per_token, expert_width;
  int64_t slice_rows;    // most rows whose experts are computed together
  int64_t is_normalised; // weights, which are sigmoids, are divided by their sum
  double expert_scale;   // times each weight
  double eps, query_scale;
  const float *cos, *sin;  // [positions, head_dim / 2]
  const float* norm;
  Matrix embedding, head;
  const Layer* layers;
  // Buffers of the largest step, each row by row.
  float *hidden_rows, *wide_rows, *attended, *expert_weights;
  int32_t* pairs;       // of tokens and experts; see experts.h
  int8_t* rounded;
  float *row_scales, *row_sums;
  float* partials;      // results of spans of decodes that several threads share
  int64_t num_partials;
  float* workspace;     // of each thread, `workspace_floats`
  int64_t workspace_floats;
};

// Consecutive tokens of one sequence: rows of the step from `row` on, at positions from `start` on.
struct Chunk {
  int64_t row, num_rows, start;
  int64_t num_replayed;                 // first rows whose keys and values are there already
  int64_t state_slot, next_state_slot;  // of the convolutions; -1: none before the first row
  const int32_t* blocks;
  int64_t piece;  // which attention numbers from the first chunk on; the library writes it
};

struct Step {
  int64_t num_rows, num_chunks, num_sampled, first_layer, end_layer;
  int64_t embeds;  // whether hidden_rows are made of token_ids, or are there already
  const int32_t *token_ids, *sampled_rows;
  Chunk* chunks;
  float* logits;   // [num_sampled, vocab]
  int32_t* best;   // [num_sampled]: the likeliest token, the first of equals; -1: not all are finite
};

// How a token is chosen from a row of logits.
struct Draw {
  double temperature, top_p, min_p;
  double noise;   // in (0, 1): where in the running sum of probabilities the token lies
  int64_t top_k;  // 0: no limit
  int64_t token;  // the result: a token or a `Refusal`
};

enum Refusal : int64_t { kNothingAllowed = -1, kNoMemory = -2 };

}  // extern "C"
