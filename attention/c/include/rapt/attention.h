/* Attention in process: the C interface of librapt_attention.so.
 *
 *     Q, K = rotary(Q), rotary(K)           if requested
 *     S = scale * Q (K + Rk)^T, or additive:  Rk and Rv: vectors of the distance, if any
 *         scale * sum over d of w[d] tanh(q[d] + k[d])
 *     S = softcap * tanh(S / softcap)       only if softcap > 0
 *     S = S + mask + bias + the bias of the
 *         distance; causality, window,
 *         lengths, block mask and selection
 *         then set -inf
 *     P = normalizer(S over keys and sink)
 *     O = P (V + Rv)
 *
 * or, with rapt_problem.gradients, the gradients of its inputs.
 *
 * The semantics are those of the ONNX operator Attention (opsets 23 to 25). Letters in shapes: B
 * batch, Hq query heads, Hkv key/value heads (Hq is a multiple of Hkv; head h reads key/value head
 * h / (Hq / Hkv)), Sq queries, Sk keys, P past keys, T = P + Sk, D head size of Q and K, Dv of V
 * and O.
 *
 *     rapt_context_options options = {.struct_size = sizeof(options), .threads = 8};
 *     rapt_problem problem = {.struct_size = sizeof(problem), .dtype = RAPT_FP32, .batch = 1, ...};
 *     rapt_arguments arguments = {.struct_size = sizeof(arguments), .query = {q}, .key = {k},
 *                                 .value = {v}, .output = {o}};
 *     rapt_context* context;
 *     rapt_plan* plan;
 *     char message[RAPT_MESSAGE_BYTES];
 *     if (rapt_context_create(&options, &context, message, sizeof(message)) != RAPT_OK) ...
 *     if (rapt_plan_create(context, &problem, &plan, message, sizeof(message)) != RAPT_OK) ...
 *     if (rapt_run(context, plan, &arguments, NULL, 0, message, sizeof(message)) != RAPT_OK) ...
 *
 * Errors: a call that can fail returns a rapt_code. Unless it is RAPT_OK, `message` (which may be
 * null) receives text with the field, its value and the allowed values, truncated to
 * `message_bytes`. A function that fails has no other effect.
 *
 * Threads: every function may be called from any thread. A context executes one rapt_run or
 * rapt_call_run at a time, and others wait; several contexts run concurrently. Plans are immutable
 * and may be shared by threads and contexts. REQUIRES: a rapt_call is not in use when it is
 * changed, and no object when it is destroyed.
 *
 * Versions: a struct begins with its size as compiled by the caller. Set all other fields to 0,
 * their default, and then those you need. New fields are added only at the end. A library older
 * than its caller rejects unknown fields unless they are 0.
 */
#ifndef RAPT_ATTENTION_H_
#define RAPT_ATTENTION_H_

#include <stddef.h> /* NOLINT(modernize-deprecated-headers): this is C */
#include <stdint.h> /* NOLINT(modernize-deprecated-headers) */

#ifdef __cplusplus
extern "C" {
#endif

/* The values are those of gRPC. */
typedef enum rapt_code {
  RAPT_OK = 0,
  RAPT_INVALID_ARGUMENT = 3,
  RAPT_RESOURCE_EXHAUSTED = 8,  /* out of memory or threads */
  RAPT_FAILED_PRECONDITION = 9, /* backend or instruction set not available on this machine */
  RAPT_UNIMPLEMENTED = 12       /* not supported by the backend, or by this older library */
} rapt_code;

/* Large enough for any message. */
#define RAPT_MESSAGE_BYTES 1024

typedef enum rapt_dtype {
  RAPT_FP32 = 1,
  RAPT_FP16 = 2, /* IEEE 754 binary16 */
  RAPT_BF16 = 3, /* the upper half of an FP32 */
  RAPT_FP64 = 4,
  RAPT_BOOL = 5, /* one byte, zero or nonzero; masks only */
  /* Only tensors of a rapt_call have these. */
  RAPT_INT32 = 8,
  RAPT_INT64 = 9
} rapt_dtype;

/* The step above to return in addition to O, [B, Hq, Sq, T] in Q's type. */
typedef enum rapt_score_output {
  RAPT_NO_SCORES = 0,
  RAPT_SCORES = 1,     /* scale * Q (K + Rk)^T, or additive scores */
  RAPT_SOFTCAPPED = 2, /* after softcap */
  RAPT_BIASED = 3,     /* after mask, causality, window and lengths: holds -inf */
  RAPT_WEIGHTS = 4     /* after softmax and dropout */
} rapt_score_output;

/* How a query and a key are compared. */
typedef enum rapt_score_function {
  RAPT_DOT_PRODUCT = 0,
  RAPT_ADDITIVE = 1 /* sum over d of additive_weight[d] * tanh(q[d] + k[d]) */
} rapt_score_function;

/* Where the queries are: query i of batch row b is at position i + offset among the T keys.
 * Causality (j <= i + offset), the window, biases and vectors by distance, and rotary embedding
 * without ids use this position. One causal query sees the first of five keys with RAPT_TOP_LEFT,
 * and all five with RAPT_BOTTOM_RIGHT. */
typedef enum rapt_alignment {
  /* offset = P. Key lengths hide keys and move no query: an entry that is padded at its end gets
   * the result of the entry alone. */
  RAPT_TOP_LEFT = 0,
  /* offset = T - Sq: the last query is at the last key. With key lengths, at the last key of its
   * entry: offset = P + max(key_lengths[b], min(Sq, Sk)) - Sq. */
  RAPT_BOTTOM_RIGHT = 1,
  /* The rule of the ONNX operator: offset = P with a past; else key_lengths[b] - Sq with lengths;
   * else 0. */
  RAPT_ONNX = 2
} rapt_alignment;

/* Turns the scores of a row into weights that sum to 1. All but softmax give exactly 0 to keys with
 * low scores, whose value then does not matter: P = max((alpha - 1) S - tau, 0)^(1 / (alpha - 1)),
 * with tau such that the sum of P is 1. They have no lse and no head_sink. */
typedef enum rapt_normalizer {
  RAPT_SOFTMAX = 0,   /* alpha = 1 */
  RAPT_SPARSEMAX = 1, /* alpha = 2 */
  RAPT_ENTMAX15 = 2,  /* alpha = 1.5 */
  RAPT_ENTMAX = 3     /* alpha or head_alpha is given */
} rapt_normalizer;

/* The gradients that a backward pass returns: a bit for each input that has one. */
typedef enum rapt_gradient {
  RAPT_D_QUERY = 1 << 0,
  RAPT_D_KEY = 1 << 1, /* with values_in_keys the sum of its gradients as keys and as values */
  RAPT_D_VALUE = 1 << 2,
  RAPT_D_MASK = 1 << 3, /* of a mask with a float type */
  RAPT_D_PAST_KEY = 1 << 4,
  RAPT_D_PAST_VALUE = 1 << 5,
  RAPT_D_BIAS = 1 << 6,
  RAPT_D_HEAD_SINK = 1 << 7,
  RAPT_D_ALIBI_SLOPES = 1 << 8,
  RAPT_D_BIAS_TABLE = 1 << 9,
  RAPT_D_RELATIVE_BIAS = 1 << 10,
  RAPT_D_RELATIVE_KEYS = 1 << 11,
  RAPT_D_RELATIVE_VALUES = 1 << 12,
  RAPT_D_RELATIVE_QUERY = 1 << 13,
  RAPT_D_ADDITIVE_WEIGHT = 1 << 14
} rapt_gradient;

/* --- Threads --------------------------------------------------------------------------------- */

typedef struct rapt_context_options {
  size_t struct_size;
  int64_t threads;     /* 1 to 1024, including the thread that calls rapt_run */
  const char* backend; /* null or "auto", "cpu", "reference" */
  const char* isa;     /* null or "auto", or an instruction set: "avx512", "avx2", "portable" */
} rapt_context_options;

/* Compute threads and a workspace. */
typedef struct rapt_context rapt_context;

/* Starts options->threads - 1 threads, which sleep while there is no work. */
rapt_code rapt_context_create(const rapt_context_options* options, rapt_context** context,
                              char* message, size_t message_bytes);

/* Joins the threads. NULL is a no-op. */
void rapt_context_destroy(rapt_context* context);

/* --- The problem ----------------------------------------------------------------------------- */

typedef struct rapt_problem {
  size_t struct_size;

  int32_t dtype; /* a rapt_dtype: of Q, K, V, O, the past and the scores */
  int32_t causal;
  int64_t batch;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t query_length;
  int64_t key_length;
  int64_t past_length; /* keys that precede the Sk new ones */
  int64_t head_size;
  int64_t value_head_size;

  double scale; /* used if has_scale; otherwise 1 / sqrt(D), or 1 for additive scores */
  int32_t has_scale;
  int32_t alignment; /* a rapt_alignment */
  double softcap;    /* 0: none */

  /* With a window, i + offset - left_window <= j <= i + offset + right_window. */
  int32_t has_left_window; /* 0: unbounded on that side */
  int32_t has_right_window;
  int64_t left_window;
  int64_t right_window;

  int32_t mask_dtype; /* 0: no mask; RAPT_BOOL: true = attend; a float type: added to the scores */
  int32_t has_key_lengths; /* only the first key_lengths[b] of the Sk keys are valid */
  int64_t mask_shape[4]; /* [1 or B, 1 or Hq, 1 or Sq, 1 or at most T]; keys beyond it are masked */

  double dropout_probability; /* 0: none; less than 1 */
  uint64_t dropout_seed;

  int32_t softmax_in_fp64; /* implied by FP64 inputs */
  int32_t score_output;    /* a rapt_score_output */
  int32_t wants_lse;
  int32_t wants_present;

  int32_t head_sink_dtype; /* 0: none; RAPT_FP32 or dtype: the score of one more key per head,
                              without a value and never scaled, capped or masked */
  int32_t bias_dtype;      /* 0: none; a float type: added to the scores like a float mask */
  int64_t bias_shape[4];   /* as mask_shape */

  /* Biases by the distance j - p, where p = i + offset is the position of query i among the keys;
   * at most one of alibi, alibi_slopes, bias_table and relative_bias. Types are RAPT_FP32 or dtype;
   * 0: none. */
  int32_t alibi;              /* alibi_slopes with the default slopes of ALiBi */
  int32_t alibi_slopes_dtype; /* -slope * |j - p| */
  int64_t alibi_slopes_batch; /* 1 or B */
  int32_t bias_table_dtype;   /* T5: a bias for each bucket of distances */
  int32_t is_bidirectional;   /* half of the buckets are for later keys */
  int64_t bias_table_buckets; /* at least 2; 4 if is_bidirectional */
  int64_t max_distance;       /* used if has_max_distance; otherwise 128 */
  int32_t has_max_distance;
  int32_t relative_bias_dtype;  /* entry c + (j - p), where j - p is clipped to [-c, c] */
  int64_t relative_bias_heads;  /* 1 or Hq */
  int64_t relative_bias_length; /* 2c + 1 */

  /* V is the first value_head_size numbers of each row of K, and likewise of the past: no value,
   * past_value and present_value. */
  int32_t values_in_keys;

  /* Vectors by distance: vector c + (j - p), where j - p is clipped to [-c, c], is added to key or
   * value j. Types are RAPT_FP32 or dtype; 0: none. */
  int32_t relative_keys_dtype;
  int64_t relative_keys_heads;  /* 1 or Hq */
  int64_t relative_keys_length; /* 2c + 1 */
  int64_t relative_values_heads;
  int64_t relative_values_length;
  int32_t relative_values_dtype;
  int32_t has_relative_query; /* relative_query multiplies the relative_keys instead of Q */

  /* Rotary embedding of Q and K before the scores, as the ONNX operator RotaryEmbedding-23 on the
   * first r numbers of each head, rounded to dtype; the past is rotated already. With a cache or
   * with rope_theta, not both. */
  int32_t rotary_cache_dtype; /* 0: none; RAPT_FP32 or dtype */
  int64_t rotary_cache_batch; /* 0: [rows, pairs], a row for each position; B: [B, rows, pairs] */
  int64_t rotary_cache_rows;
  int64_t rotary_cache_pairs;   /* r / 2 */
  int32_t has_position_ids;     /* otherwise the position of query i is i + offset */
  int32_t has_key_position_ids; /* otherwise that of new key j is P + j */
  int32_t interleaved;          /* pairs (2t, 2t + 1), otherwise (t, t + r / 2) */
  int32_t rotary_keys;          /* used if has_rotary_keys: 0: only Q is rotated */
  int32_t has_rotary_keys;
  int32_t has_rope_theta;
  double rope_theta;            /* positive: angle t is position * rope_theta^(-2t / r) */
  int64_t rotary_embedding_dim; /* r, even; 0: D */

  int32_t score_function;        /* a rapt_score_function */
  int32_t additive_weight_dtype; /* of additive scores: RAPT_FP32 or dtype; otherwise 0 */
  int64_t additive_weight_heads; /* 1 or Hq */

  int32_t normalizer;       /* a rapt_normalizer */
  int32_t has_alpha;        /* with RAPT_ENTMAX either alpha or head_alpha */
  int32_t head_alpha_dtype; /* 0: none; RAPT_FP32 or dtype: the alpha of each head */
  double alpha;             /* used if has_alpha: 1 (softmax) to 2 (sparsemax) */

  /* Query i sees key j if causality, lengths, mask, block mask and selection show it, and one of:
   * the window shows it, j < prefix_keys, global_mask[j], or global_mask[p], where p = i + offset
   * is the position of query i among the keys; false for p outside [0, T). */
  int32_t has_block_mask;   /* BOOL: entry [i / block_q, j / block_k] shows key j to query i */
  int64_t block_mask_batch; /* 1 or B */
  int64_t block_mask_heads; /* 1 or Hq */
  int64_t block_q;          /* queries and keys of a block, at least 1; used if has_block_mask */
  int64_t block_k;
  int64_t selected_count; /* N, keys selected by each query; used if has_selected_indices */
  int64_t selected_heads; /* 1 or Hkv */
  int32_t has_selected_indices;
  int32_t has_global_mask;
  int64_t prefix_keys;

  /* Not 0: the backward pass, the gradients of a loss by these inputs for its gradient dO by O.
   * With Z the 0 or 1 / (1 - probability) of dropout and delta = sum dO O - dlse of each row:
   *     P = e^(S - lse)                     before dropout
   *     dX = P * (Z * (dO (V + Rv)^T) - delta)        of mask, bias and biases by the distance
   *     dS = dX * (1 - (S after softcap / softcap)^2)
   *     dQ = scale * dS (K + Rk), dK = scale * dS^T Q, dV = (P * Z)^T dO
   * Hidden pairs, and rows without a visible key, contribute exactly 0, whatever the tensors
   * contain there; but such a row adds dlse to the gradient of its sink. O, scores, lse and present
   * are not returned: score_output, wants_lse and wants_present must be 0. */
  uint64_t gradients; /* bits of rapt_gradient, whose inputs the problem has; 0: the forward pass */
  int32_t has_forward;      /* forward_output and forward_lse are given; otherwise they are computed
                               again, with 7 instead of 5 matrix products; RAPT_SOFTMAX only */
  int32_t has_lse_gradient; /* lse_gradient is given; otherwise 0; RAPT_SOFTMAX only */
} rapt_problem;

/* How a problem will be computed. Depends only on the problem and the context's options; the same
 * plan on the same machine gives the same bits. */
typedef struct rapt_plan rapt_plan;

rapt_code rapt_plan_create(const rapt_context* context, const rapt_problem* problem,
                           rapt_plan** plan, char* message, size_t message_bytes);
void rapt_plan_destroy(rapt_plan* plan); /* NULL is a no-op. */

/* Returns the exact workspace that rapt_run needs, in bytes; rapt_run itself allocates nothing. */
size_t rapt_plan_workspace_bytes(const rapt_plan* plan);

/* "cpu/avx512 q96 k64 s1": backend, instruction set, tiles. Lives as long as the plan. */
const char* rapt_plan_description(const rapt_plan* plan);

/* --- Execution ------------------------------------------------------------------------------- */

/* A tensor of rank 4, [batch, head, position, element]. Strides count elements; the last one is 1
 * except in masks. Strides of axes of size 1 are ignored; 0 broadcasts an axis of an input. All
 * four 0: row-major. The data need not be aligned. */
typedef struct rapt_input {
  const void* data;
  int64_t strides[4];
} rapt_input;

typedef struct rapt_output {
  void* data;
  int64_t strides[4];
} rapt_output;

/* Tensors that the problem does not use are ignored. REQUIRES: outputs overlap no other tensor. */
typedef struct rapt_arguments {
  size_t struct_size;

  rapt_input query;           /* [B, Hq, Sq, D] */
  rapt_input key;             /* [B, Hkv, Sk, D] */
  rapt_input value;           /* [B, Hkv, Sk, Dv] */
  rapt_input mask;            /* mask_shape */
  rapt_input past_key;        /* [B, Hkv, P, D] */
  rapt_input past_value;      /* [B, Hkv, P, Dv] */
  const int64_t* key_lengths; /* [B], each from 0 to Sk */

  rapt_output output;        /* [B, Hq, Sq, Dv] */
  rapt_output lse;           /* [B, Hq, Sq, 1], FP32, or FP64 for FP64: log of the sum of exp(S) */
  rapt_output scores;        /* [B, Hq, Sq, T] */
  rapt_output present_key;   /* [B, Hkv, T, D]: the past, then K */
  rapt_output present_value; /* [B, Hkv, T, Dv] */

  rapt_input head_sink; /* [Hq, 1, 1, 1] */
  rapt_input bias;      /* bias_shape */

  rapt_input alibi_slopes;  /* [1 or B, Hq, 1, 1] */
  rapt_input bias_table;    /* [buckets, Hq, 1, 1] */
  rapt_input relative_bias; /* [1 or Hq, 2c + 1, 1, 1] */

  rapt_input relative_keys;   /* [1 or Hq, 2c + 1, D, 1] */
  rapt_input relative_values; /* [1 or Hq, 2c + 1, Dv, 1] */
  rapt_input relative_query;  /* [B, Hq, Sq, D] */

  rapt_input cos_cache; /* [rows, pairs, 1, 1] or [B, rows, pairs, 1] */
  rapt_input sin_cache;
  rapt_input position_ids;     /* int64_t, [B, Sq, 1, 1] */
  rapt_input key_position_ids; /* int64_t, [B, Sk, 1, 1] */

  rapt_input additive_weight;  /* [1 or Hq, D, 1, 1] */
  rapt_input head_alpha;       /* [Hq, 1, 1, 1] */
  rapt_input block_mask;       /* bytes, [1 or B, 1 or Hq, Sq / block_q, T / block_k], rounded up */
  rapt_input selected_indices; /* int32_t [B, 1 or Hkv, Sq, N]: different keys from 0 to T - 1, or
                                  -1, unused, in any order */
  rapt_input global_mask;      /* bytes, [B, T, 1, 1] */

  /* Of the backward pass. */
  rapt_input output_gradient; /* dO, [B, Hq, Sq, Dv], dtype */
  rapt_input forward_output;  /* O, as output */
  rapt_input forward_lse;     /* as lse */
  rapt_input lse_gradient;    /* dlse, as lse */

  /* The gradients; each has the type and shape of its input, with axes that the input broadcasts
   * summed. */
  rapt_output d_query;
  rapt_output d_key;
  rapt_output d_value;
  rapt_output d_mask;
  rapt_output d_past_key;
  rapt_output d_past_value;
  rapt_output d_bias;
  rapt_output d_head_sink;
  rapt_output d_alibi_slopes;
  rapt_output d_bias_table;
  rapt_output d_relative_bias;
  rapt_output d_relative_keys;
  rapt_output d_relative_values;
  rapt_output d_relative_query;
  rapt_output d_additive_weight;
} rapt_arguments;

#define RAPT_WORKSPACE_ALIGNMENT 64

/* Computes the plan; blocks until done. `workspace` is aligned to RAPT_WORKSPACE_ALIGNMENT, has
 * workspace_bytes bytes, at least those of the plan, and is not used by another run at the same
 * time. If it is null, the context uses its own workspace, which grows to that of the largest plan
 * run and is freed by rapt_context_destroy. REQUIRES: the context has no more threads than the one
 * with which the plan was created. */
rapt_code rapt_run(rapt_context* context, const rapt_plan* plan, const rapt_arguments* arguments,
                   void* workspace, size_t workspace_bytes, char* message, size_t message_bytes);

/* --- Operators by their names ---------------------------------------------------------------- */

/* A call of an operator by its name, with tensors and attributes by theirs:
 *
 *     const int64_t shape[] = {1, tokens, heads * size};
 *     const rapt_tensor tensors[] = {{"query", q}, {"key", k}, {"value", v}, {"output", o}};
 *     rapt_call* call;
 *     rapt_plan* plan;
 *     if (rapt_call_create("linear_attention", &call, message, sizeof(message)) != RAPT_OK) ...
 *     rapt_call_set_input(call, "query", RAPT_FP32, 3, shape, NULL, 0); likewise key and value
 *     rapt_call_set_integer(call, "q_num_heads", heads, NULL, 0); likewise kv_num_heads
 *     rapt_call_set_text(call, "update_rule", "linear", NULL, 0);
 *     if (rapt_call_plan(context, call, &plan, message, sizeof(message)) != RAPT_OK) ...
 *     if (rapt_call_run(context, plan, tensors, 4, NULL, 0, NULL, 0) != RAPT_OK) ...
 *     rapt_plan_destroy(plan);
 *     rapt_call_destroy(call);
 *
 * The operators follow. Tensors of an operator have one float type unless said otherwise; "any
 * float" may differ from it. Letters: B and D as above, T or S tokens, Hq and Hkv heads, H heads of
 * both, d_k and d_v the sizes of a head of keys and values. Sizes and numbers of heads are at most
 * 65536, except in attention.
 *
 * attention, the ONNX operator Attention (opsets 23 to 25) with extensions: rapt_problem as a call,
 * by the names that the model `attention` has in the Open Inference Protocol. Its inputs are Q, K
 * and V [B, H, S, D], or [B, S, H * D] with q_num_heads and kv_num_heads, attn_mask, past_key,
 * past_value, nonpad_kv_seqlen [B] and those of rapt_arguments under their names there (bias is
 * attention_bias); its outputs Y and, if wanted, qk_matmul_output, lse, and both of present_key and
 * present_value if one of them is wanted; its attributes is_causal, scale, softcap,
 * softmax_precision, qk_matmul_output_mode (0 to 3), left_window_size, right_window_size and others
 * of rapt_problem under their names there, layout ("bhsd", "bshd" or "bse") and alignment, "onnx"
 * by default.
 *
 * attention_backward, its gradients: the inputs of attention and dY, optionally Y and lse of the
 * forward pass, and dlse. Outputs are, if wanted, dQ, dK, dV and d_ and the name of another input;
 * if none is wanted dQ, dK and dV.
 *
 * linear_attention, the ONNX operator LinearAttention (opset 27): a state S of d_k x d_v numbers
 * for each key/value head instead of keys. For each token S = e^decay S + k u^T and output = scale
 * S^T q, with u = value, or by a delta rule u = beta (value - (e^decay S)^T k). Sums are in FP32,
 * or in FP64 for FP64. Features are d_k, or num_features of favor.
 *
 *     query               [B, T, Hq * d_k]
 *     key                 [B, T, Hkv * d_k]
 *     value               [B, T, Hkv * d_v]
 *     decay               [B, T, Hkv] or [B, T, Hkv * d_k], usually not positive, any float; of the
 *                         rules gated and gated_delta
 *     beta                [B, T, Hkv] or [B, T, 1], any float; of the rules delta and gated_delta
 *     past_state          optional: [B, Hkv, features, d_v], any float
 *     past_normalizer     beside past_state of a normalized output: [B, Hkv, features], any float
 *     projection          optional, of favor: its directions, [num_features, d_k], any float
 *     nonpad_kv_seqlen    optional: [B], INT64, 0 to T; tokens from there on do not count
 *     output              [B, T, Hq * d_v]
 *     present_state       if wanted: the past_state of later tokens, of state_type
 *     present_normalizer  if wanted, of a normalized output: their past_normalizer
 *     relative_error      with error_rows: [1], FP32
 *
 *     q_num_heads         needed: an integer, a multiple of kv_num_heads
 *     kv_num_heads        needed: an integer
 *     update_rule         gated_delta (default), linear, gated or delta
 *     scale               a number; 0 (default): 1 / sqrt(d_k)
 *     is_causal           1 (default), or 0: every query sees all tokens; of the rule linear
 *     feature_map         none (default); elu1: x + 1 if x > 0, else e^x; relu: max(x, 0); favor:
 *                         FAVOR+, an estimate of softmax attention, of the rule linear
 *     normalize           0 (default), or 1: divide by the sum of the products with keys, of the
 *                         rule linear; favor always does
 *     num_features        of favor, 1 to 65536; default floor(d_k ln d_k)
 *     seed                of favor's directions without projection; default 0
 *     state_type          "FP32", "FP16", "BF16" or "FP64"; default past_state's, or query's
 *     chunk_size          a hint, at least 1; default 64
 *     error_rows          of favor: rows whose error as an estimate of softmax attention is
 *                         measured, 0 (default) to 65536
 *
 * lsh_attention, "Reformer: The Efficient Transformer" (Kitaev et al. 2020): in each round, tokens
 * are sorted by their bucket and position and cut into chunks, and a chunk sees itself and its
 * neighbours.
 *
 *     Q                   [B, H, S, D]: queries; of the Reformer's form also keys
 *     V                   [B, H, S, Dv]
 *     K                   of the simple form: keys, [B, H, S, D]
 *     rotations           instead of seed: [1 or H, D, num_hashes, num_buckets / 2], of the simple
 *                         form [1 or H, D, num_hashes, D], any float
 *     nonpad_kv_seqlen    optional: [B], INT64, 0 to S; tokens from there on do not count
 *     Y                   [B, H, S, Dv]
 *     buckets             if wanted: [B, H, num_hashes, S], INT32; that of padding is num_buckets
 *
 *     form                reformer (default): a token sees itself only if it sees no other, and
 *                         rounds are weighted by their lse; simple, as in tutorials: hashes K,
 *                         chunks see themselves alone, and rounds count equally
 *     num_hashes          rounds, 1 (default) to 1024
 *     num_buckets         even; 0 (default): the largest power of two up to 2 S / chunk_length; of
 *                         the simple form 0 or D
 *     chunk_length        needed: a divisor of S, or at least S: then nothing is hashed
 *     chunks_before       neighbours that a chunk sees; default 1, of the simple form 0
 *     chunks_after        likewise; default 0
 *     is_causal           0 (default) or 1, of the reformer
 *     scale               a number; default 1 / sqrt(D)
 *     seed                instead of rotations: draws them
 *
 * rotary_embedding, the ONNX operator RotaryEmbedding (opset 23).
 *
 *     X                   [B, H, S, D], or [B, S, H * D] with num_heads
 *     cos_cache           instead of rope_theta: [M, r / 2] or [B, S, r / 2], FP32 or of X's type
 *     sin_cache           as cos_cache
 *     position_ids        optional: [B, S], INT64, 0 to M - 1; otherwise token s is at position s
 *     Y                   as X, which it may overwrite
 *
 *     interleaved         1: pairs (2t, 2t + 1); 0 (default): (t, t + r / 2)
 *     num_heads           H, of an X of rank 3
 *     rotary_embedding_dim  r, even; 0 (default): D
 *     rope_theta          instead of the caches: angle t is position * rope_theta^(-2t / r)
 *
 * positional_encoding adds a vector to each position.
 *
 *     X                   [..., S, E]
 *     table               optional: [M, E] with M at least S, FP32 or of X's type
 *     Y                   as X
 *
 *     base                instead of table: sines and cosines of s * base^(-2i / E); default 10000
 */
typedef struct rapt_call rapt_call;

rapt_code rapt_call_create(const char* op, rapt_call** call, char* message, size_t message_bytes);
void rapt_call_destroy(rapt_call* call); /* NULL is a no-op. */

#define RAPT_MAX_RANK 8

/* Sets the type and shape of an input, which is row-major. `rank` is 0 to RAPT_MAX_RANK. */
rapt_code rapt_call_set_input(rapt_call* call, const char* name, int32_t dtype, int32_t rank,
                              const int64_t* shape, char* message, size_t message_bytes);

/* Sets an attribute that is an integer, a number, a switch, which is 0 or 1, or a float type by the
 * code that ONNX has for it, which is not that of rapt_dtype. */
rapt_code rapt_call_set_integer(rapt_call* call, const char* name, int64_t value, char* message,
                                size_t message_bytes);
/* Sets an attribute that is a number. */
rapt_code rapt_call_set_number(rapt_call* call, const char* name, double value, char* message,
                               size_t message_bytes);
/* Sets an attribute of any kind: "linear", "FP16", "0.5", "true". */
rapt_code rapt_call_set_text(rapt_call* call, const char* name, const char* value, char* message,
                             size_t message_bytes);

/* Asks for an output. Only those that are described with "if wanted" need it. */
rapt_code rapt_call_want(rapt_call* call, const char* output, char* message, size_t message_bytes);

/* As rapt_plan_create. The plan is independent of the call, which may be changed or destroyed. */
rapt_code rapt_call_plan(const rapt_context* context, const rapt_call* call, rapt_plan** plan,
                         char* message, size_t message_bytes);

/* Type and shape of an output. RAPT_INVALID_ARGUMENT if the plan does not have it. */
rapt_code rapt_plan_output(const rapt_plan* plan, const char* name, int32_t* dtype, int32_t* rank,
                           int64_t shape[RAPT_MAX_RANK], char* message, size_t message_bytes);

/* The data of an input, which is only read, or of an output. This struct keeps its size. */
typedef struct rapt_tensor {
  const char* name;
  void* data;
} rapt_tensor;

/* As rapt_run, for a plan of rapt_call_plan. `tensors` are those of the plan, in any order. Those
 * without elements may be absent or null; those that the plan does not have are ignored. Of a name
 * given twice, the last one counts. REQUIRES: outputs overlap no other tensor, unless the operator
 * says so. */
rapt_code rapt_call_run(rapt_context* context, const rapt_plan* plan, const rapt_tensor* tensors,
                        size_t count, void* workspace, size_t workspace_bytes, char* message,
                        size_t message_bytes);

/* "0.1.0" */
const char* rapt_version(void);

#ifdef __cplusplus
}
#endif

#endif /* RAPT_ATTENTION_H_ */
