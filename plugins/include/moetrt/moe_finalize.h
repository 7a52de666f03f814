/* The C interface of libmoetrt_plugins: one struct that names every operand of a MoE tail, and the call that runs it.
 *
 * Both operators go through here: MoEFinalizeAddRMSNorm (gamma given) and MoEFinalizeAdd (gamma null). TensorRT's
 * enqueue, the PyTorch binding and the tests fill the same struct, so that all of them run the same kernel.
 */
#ifndef MOETRT_MOE_FINALIZE_H
#define MOETRT_MOE_FINALIZE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes whenever the struct below or the meaning of a call changes. */
#define MOETRT_ABI_VERSION 2

typedef enum { MOETRT_FLOAT = 0, MOETRT_HALF = 1, MOETRT_BFLOAT16 = 2 } moetrt_dtype;

/*
 * routed[t]       = sum over k of expert_weights[t,k] * gemm2_permuted[map[t,k]]        (map -1: nothing is added)
 * hidden[t]       = residual_scale * residual[t]
 *                   + combine_scale * (routed_scaling_factor * routed[t] + sigmoid(shared_gate[t]) * shared_output[t])
 * residual_out[t] = hidden[t] rounded to dtype
 * norm_out[t]     = RMSNorm(residual_out[t]; gamma + weight_bias, eps)
 *
 * All arrays are dense and row-major. Pointers marked "or null" are optional operands.
 */
typedef struct {
    int64_t num_tokens;  /* T */
    int64_t top_k;       /* K */
    int64_t num_rows;    /* R: rows of gemm2_permuted */
    int64_t row_stride;  /* Hp: elements from one row of gemm2_permuted to the next, >= hidden_size */
    int64_t hidden_size; /* H */

    const void* gemm2_permuted;                  /* [R, Hp], dtype */
    const void* expert_weights;                  /* [T, K], weights_dtype */
    const int32_t* expanded_idx_to_permuted_idx; /* [T, K], or null: row t*K+k */
    const void* shared_output;                   /* [T, H], dtype, or null */
    const void* shared_gate;                     /* [T, 1], gate_dtype, or null */
    const void* residual;                        /* [T, H], dtype, or null */
    const void* gamma;                           /* [H], gamma_dtype, or null: MoEFinalizeAdd */
    void* norm_out;                              /* [T, H], dtype; null exactly where gamma is */
    void* residual_out;                          /* [T, H], dtype; MoEFinalizeAdd's hidden */

    int32_t dtype;         /* moetrt_dtype of the rows, shared_output, residual and both outputs */
    int32_t weights_dtype; /* dtype or MOETRT_FLOAT */
    int32_t gate_dtype;    /* dtype or MOETRT_FLOAT */
    int32_t gamma_dtype;   /* dtype or MOETRT_FLOAT */

    float eps;
    float residual_scale;
    float combine_scale;
    float routed_scaling_factor;
    float weight_bias;
    int32_t weight_before_cast;   /* 1: gamma is multiplied in fp32, one rounding; 0: round to dtype, then multiply */
    int32_t apply_expert_weights; /* 0: expert_weights is not read, every route counts once */

    /* 1: on SM90 and later the kernel may start while the one before it on the stream ends, and waits for that one's
     * end before it reads or writes anything; 0: it starts afterwards. The numbers are the same. */
    int32_t programmatic_dependent_launch;
} moetrt_moe_finalize_params;

/* What of a GPU decides which tactics it runs and which is taken. */
typedef struct {
    int32_t compute_capability; /* 10 * major + minor, 90 for SM90; less where the kernels were compiled for less, or
                                   where the device launches no clusters */
    int32_t multiprocessors;
} moetrt_device;

/* Lets the library choose, by moetrt_moe_finalize_tactics' first answer. */
#define MOETRT_TACTIC_DEFAULT 0

/* MOETRT_ABI_VERSION of the library that is loaded. */
int32_t moetrt_abi_version(void);

/* The library's version, as in pyproject.toml. */
const char* moetrt_version(void);

/* The last refusal on this thread, one line without a newline; "" when there was none. */
const char* moetrt_last_error(void);

/* Forgets the last refusal on this thread. */
void moetrt_clear_last_error(void);

/*
 * Whether refusals are also shown, with the prefix "[moetrt] ", as they happen; they are until this says otherwise. For
 * callers that show moetrt_last_error() themselves. Holds for the whole process; returns what held before.
 */
int32_t moetrt_show_errors(int32_t show);

/*
 * Runs the tail on `stream` (a cudaStream_t; null is the default stream) with the default tactic. Allocates nothing and
 * does not synchronise; may be captured into a CUDA graph, and the first call on a device, which prepares the kernels
 * there, may be too.
 * Returns 0, or non-zero with the reason in moetrt_last_error(): a parameter that is not taken, or the launch's CUDA
 * error.
 */
int32_t moetrt_moe_finalize(const moetrt_moe_finalize_params* params, void* stream);

/* The same with a tactic; one that does not run these params on the current device is refused. */
int32_t moetrt_moe_finalize_with_tactic(const moetrt_moe_finalize_params* params, int32_t tactic, void* stream);

/*
 * The tactics worth timing for `params` on `device`, the default one first: writes up to `capacity` of them to
 * `tactics` and returns how many there are, at least 1; they are positive and differ. Looks at sizes, dtypes and the
 * alignment of pointers (null counts as aligned), and needs no GPU. Neither struct may be null. Which is the default
 * depends on `params` and `device` alone.
 */
int32_t moetrt_moe_finalize_tactics(const moetrt_moe_finalize_params* params, const moetrt_device* device,
                                    int32_t* tactics, int32_t capacity);

/* A tactic's name, such as "cta_32"; null where there is no such tactic. */
const char* moetrt_tactic_name(int32_t tactic);

/* Describes the current CUDA device and prepares the kernels on it. Returns 0, or non-zero with moetrt_last_error(). */
int32_t moetrt_current_device(moetrt_device* device);

#ifdef __cplusplus
}
#endif

#endif
