// Launch interface of the recurrent engine, which runs any cell of kernels/recurrent/cells: one
// step from its two products, or all steps of a layer. No torch here: raw pointers, sizes, a
// stream.
//
// Cell names a cell; kGates, kVectors, kTerms, kCarried, kSaved, kReadsH, kReadsPrevious and
// kBounded are its constants (cells/cell.h, which also has stored_term). Arrays that a cell does
// not read or have may be null. T is the type of activations. Acc is the type of the arithmetic and
// of the carried values: float for float and the 16-bit types, double for double.
//
// A ragged batch takes the same steps. After a row's end carried values stay, the output is 0 and
// there is no gradient: on CUDA because the cell is shut, on the CPU because the row's steps are
// left out. The structs RaggedRows to RaggedStartBackward do the work around the steps. Row b ends
// after lengths[b] steps, clamped to the range from 0 to `steps`.
//
// Where `reset`, [steps, batch], is true, h and the carried values count as zero before that step:
// their contents reach no result and get no gradient.
//
// `zoneout`, [steps, batch, hidden], is the fraction of h that stays from the step before, from 0
// to 1: with it, h is zoneout * (h before the step) + (1 - zoneout) * (h of the cell). Carried
// values are not concerned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#ifdef MY_OPS_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace my_ops {

enum class Pass { kForward, kBackward };

// The constants of a cell that its tensors follow from: kCellSizes in cells/cell.h.
struct CellSizes {
  int gates, terms, carried, saved, vectors;
  bool reads_h;
};

template <typename T, typename Acc>
struct RecurrentStep {
  const Acc* gates_x;      // [batch, kGates, hidden] pre-activations: the input gates
  const Acc* gates_h;      // [batch, kGates, hidden] the product with h
  const T* bias_x;         // [kGates, hidden] of the input gates, or null
  const T* bias_h;         // [kGates, hidden] of the product with h, or null
  const T* vectors;        // [kVectors, hidden]; CPU only
  const T* h;              // [batch, hidden] before the step; kReadsH or zoneout
  const Acc* carried;      // [batch, kCarried, hidden]
  const int64_t* lengths;  // [batch] of a ragged batch, or null; CPU only
  const bool* reset;       // [batch] of this step, or null
  const T* zoneout;        // [batch, hidden] of this step, or null
  T* new_h;                // [batch, hidden]
  Acc* new_carried;        // [batch, kCarried, hidden]; may be carried
  T* kept_carried;         // [batch, kCarried, hidden] new_carried again, or null; CUDA only
  T* saved;                // [batch, kSaved, hidden] for backward, or null
  int64_t t;               // the step's number, which lengths are compared with
  int64_t batch, hidden;
};

template <typename T, typename Acc>
struct RecurrentStepBackward {
  const T* grad_h;          // [batch, hidden] of new_h, or null for zero
  const Acc* grad_h_next;   // [batch, hidden] a second term of it, or null
  const Acc* grad_carried;  // [batch, kCarried, hidden] of new_carried, or null for zero
  const T* saved;           // [batch, kSaved, hidden]
  const T* h;               // [batch, hidden] before the step; kReadsH
  const T* carried;         // [batch, kCarried, hidden] before the step
  T* grad_terms;            // [batch, kTerms, hidden] by stored_term, of the pre-activations
  Acc* grad_h_direct;  // [batch, hidden]; kReadsH or zoneout. In: a third term of grad_h. Out: the
                       // gradient of h that does not pass through the product
  Acc* grad_carried_before;  // [batch, kCarried, hidden]; may be grad_carried
  const int64_t* lengths;    // [batch] of a ragged batch, or null; CPU only
  const bool* reset;         // [batch] of this step, or null
  const bool* reset_next;    // [batch] of the step after, or null; true: grad_h_next is ignored
  const T* zoneout;          // [batch, hidden] of this step, or null; all steps or none have it
  int64_t t;                 // the step's number, which lengths are compared with
  int64_t batch, hidden;
};

// Rows of a state: those of `some` for rows that have a step, and else those of `none`, or zero.
template <typename T>
struct RaggedRows {
  const T* some;  // [batch, hidden]
  const T* none;  // [batch, hidden], or null for zero; may be out
  T* out;         // [batch, hidden]; may be some
  const int64_t* lengths;
  int64_t steps, batch, hidden;
};

// Sets the input gates after the rows' ends, so that it shuts the cell.
template <typename Acc>
struct RaggedShut {
  static constexpr int kMaxGates = 8;

  Acc* gates_x;  // [steps, batch, gates, hidden]
  int gates;
  Acc shut[kMaxGates];  // one value per gate
  const int64_t* lengths;
  int64_t steps, batch, hidden;
};

// Sets the output after the rows' ends to 0, and h_n to the last h of every row.
template <typename T>
struct RaggedEnds {
  T* output;    // [steps, batch, hidden]
  const T* h0;  // [batch, hidden], which is h_n of a row without a step
  T* h_n;       // [batch, hidden]
  const int64_t* lengths;
  int64_t steps, batch, hidden;
};

// Computes the gradient of the steps' own output from those of RaggedEnds' results.
template <typename T>
struct RaggedEndsBackward {
  const T* grad_output;  // [steps, batch, hidden], or null for zero
  const T* grad_h_n;     // [batch, hidden], or null for zero
  T* grad;               // [steps, batch, hidden]
  const int64_t* lengths;
  int64_t steps, batch, hidden;
};

// Copies resets without those after a row's end.
struct RaggedReset {
  static constexpr int64_t hidden = 1;

  const bool* reset;  // [steps, batch]
  bool* out;          // [steps, batch]
  const int64_t* lengths;
  int64_t steps, batch;
};

// The gradient of the first h, in ragged and other batches: lengths is null.
template <typename T, typename Acc>
struct RaggedStartBackward {
  const Acc* through;  // [batch, hidden] the part through the product of the first step
  const Acc* direct;   // [batch, hidden] the rest, or null
  const bool* reset;   // [batch] of the first step, or null
  T* grad_h0;          // [batch, hidden]
  const int64_t* lengths;
  int64_t steps, batch, hidden;
};

namespace cpu {

// All steps of a layer. The 16-bit types are widened where they are read and narrowed where they
// are written; between steps values are Acc.
template <typename T, typename Acc>
struct RecurrentSequence {
  const T* input;          // [steps, batch, inputs]
  const Acc* bias_x;       // [kGates, hidden] of the input gates, or null
  const Acc* bias_h;       // [kGates, hidden] of the product with h, or null
  const Acc* vectors;      // [kVectors, hidden]
  const Acc* weights_x;    // the weights of the input transposed, [inputs, kGates, hidden], packed
  const Acc* weights_h;    // the weights of h transposed, [hidden, kGates, hidden], packed
  const T* h0;             // [batch, hidden]
  const T* carried0;       // [batch, kCarried, hidden]
  const int64_t* lengths;  // [batch] of a ragged batch, or null
  const bool* reset;       // [steps, batch], false beyond a row's end, or null
  const T* zoneout;        // [steps, batch, hidden], or null
  T* output;               // [steps, batch, hidden]
  T* carried_n;            // [batch, kCarried, hidden]
  T* saved;                // [steps, batch, kSaved, hidden] for backward, or null
  T* carried;              // [steps, batch, kCarried, hidden] for backward, or null
  int64_t steps, batch, inputs, hidden;
};

template <typename T, typename Acc>
struct RecurrentSequenceBackward {
  const T* grad_output;     // [steps, batch, hidden], or null for zero
  const T* grad_h_n;        // [batch, hidden], or null for zero
  const T* grad_carried_n;  // [batch, kCarried, hidden], or null for zero
  const T* saved;           // [steps, batch, kSaved, hidden]
  const T* carried;         // [steps, batch, kCarried, hidden]
  const T* output;          // [steps, batch, hidden] of forward; kReadsH
  const T* h0;              // [batch, hidden]; kReadsH
  const T* carried0;        // [batch, kCarried, hidden]
  const Acc* weights_h;     // the weights of h, [kGates, hidden, hidden], packed
  const int64_t* lengths;   // [batch] of a ragged batch, or null
  const bool* reset;        // [steps, batch], or null
  const T* zoneout;         // [steps, batch, hidden], or null
  T* grad_terms;            // [steps, batch, kTerms, hidden] by stored_term
  T* grad_h0;               // [batch, hidden]
  T* grad_carried0;         // [batch, kCarried, hidden]
  int64_t steps, batch, hidden;
  bool of_states;  // whether grad_h0 and grad_carried0 are read: else weights_h is not, in one step
};

// All of these for float and double.

// Columns of a panel of packed weights: 128 bytes, two of the widest vectors.
template <typename T>
constexpr int kPanel = 128 / sizeof(T);

// The number of elements of a packed [k, n], and the packing of b, with strides in elements.
template <typename T>
int64_t packed_size(int64_t k, int64_t n) {
  return (n + kPanel<T> - 1) / kPanel<T> * kPanel<T> * k;
}
template <typename T>
void pack(const T* b, int64_t row, int64_t col, int64_t k, int64_t n, T* packed);

// c[m, n] = a[m, k] @ b, with strides in elements.
template <typename T>
struct Product {
  const T* a;
  const T* b;
  T* c;
  int64_t a_row, b_row, b_col, c_row, m, k;
};
// Columns [begin, end) of c. begin is a multiple of kColumnsTogether. So many columns at a time are
// packed, into packed[packed_size(k, kColumnsTogether)], and multiplied with all rows while they
// are in the cache.
constexpr int64_t kColumnsTogether = 32;
template <typename T>
void product_columns(const Product<T>& args, int64_t begin, int64_t end, T* packed);

// c of n columns, without packing: b_col must be 1. Columns of a are a_col apart.
template <typename T>
void few_products(const Product<T>& args, int64_t a_col, int64_t n);

// Rows and units [begin, end) of a step. gates_h holds only those: [rows, kGates, units].
struct Range {
  int64_t begin, end;
};
template <typename Cell, typename T>
void recurrent_step(const RecurrentStep<T, T>& args, Range rows, Range units);

// Units [begin, end) of a step, all rows, including the product with h: args.gates_h is not read.
// weights_h holds, gate by gate, the transposed weights of h, [hidden, hidden], packed. begin is a
// multiple of kUnitsTogether.
constexpr int64_t kUnitsTogether = 64;
template <typename Cell, typename T>
void recurrent_units(const RecurrentStep<T, T>& args, const T* weights_h, Range units);

// Rows [begin, end) of the batch.
template <typename Cell, typename T>
void recurrent_step_backward(const RecurrentStepBackward<T, T>& args, int64_t begin, int64_t end);

// The same for the 16-bit types, and all steps of the rows for every type: kRows rows at a time, in
// a workspace of workspace_size(...) for these.
constexpr int64_t kRows = 16;  // what a step of them needs stays in the cache
template <typename Cell, typename T>
void recurrent_step_backward(const RecurrentStepBackward<T, float>& args, int64_t begin,
                             int64_t end, float* workspace);
template <typename Cell, typename T, typename Acc>
void recurrent_sequence(const RecurrentSequence<T, Acc>& args, int64_t begin, int64_t end,
                        Acc* workspace);
template <typename Cell, typename T, typename Acc>
void recurrent_sequence_backward(const RecurrentSequenceBackward<T, Acc>& args, int64_t begin,
                                 int64_t end, Acc* workspace);

// Both products, and of a 16-bit type all that a step reads and writes.
template <typename T, typename Acc>
int64_t workspace_size(const CellSizes& cell, const RecurrentSequence<T, Acc>& args) {
  const int64_t values = (3 + cell.carried + cell.saved) * args.hidden + args.inputs;
  return kRows * (2 * cell.gates * args.hidden + (std::is_same_v<T, Acc> ? 0 : values));
}
// The gradient past the product, and the same.
template <typename T, typename Acc>
int64_t workspace_size(const CellSizes& cell, const RecurrentSequenceBackward<T, Acc>& args) {
  const int64_t values = 4 + 2 * cell.carried + cell.saved + cell.terms;
  return kRows * args.hidden * (1 + (std::is_same_v<T, Acc> ? 0 : values));
}
template <typename T>
int64_t workspace_size(const CellSizes& cell, const RecurrentStepBackward<T, float>& args) {
  return kRows * args.hidden * (3 + cell.carried + cell.saved + cell.terms);
}

// One of the structs Ragged...
template <typename Ragged>
void ragged(const Ragged& args);

}  // namespace cpu

namespace cuda {

// What a plan needs to know about a cell: kCellFacts in cells/cell.h.
struct CellFacts {
  int gates, terms;
  int state;  // values of a unit that stay in its block from step to step, h included if it is read
  bool bounded;  // |h_t| <= max(1, |h_{t-1}|)
};

// A layer, as its plan sees it: plain numbers.
struct RecurrentProblem {
  CellFacts cell;
  Pass pass;
  int width;  // bytes of an activation: 4 or 2
  int64_t steps, batch, hidden;
};

// Groups of blocks that exchange through L2 (kernels/recurrent/grid). A group holds all of W_h, and
// a block 16 * unit_tiles units of it. The groups divide the rows of the batch and never
// communicate.
struct GridPlan {
  int unit_tiles;  // 1 or 2
  int members;     // blocks of a group
  int groups;
  int rows;          // of the batch, per group
  int row_tiles;     // tiles of 8 rows that a block takes at a time: 1 or 2
  int chunks;        // of h, 64 bytes each, that a warp takes; the kernel's template argument
  int shared_bytes;  // of a block
};

// Clusters that exchange through distributed shared memory (cluster/).
struct ClusterPlan {
  int blocks;        // of a cluster, which holds all of W_h
  int rows;          // of the batch, per cluster: 1, 2 or 4
  int chunks;        // of 64 units, which cover the hidden size: 1, 2 or 4
  int spread_bytes;  // shared memory that a block may ask for to have its SM to itself
};

// Warps that run rows on their own (warp/).
struct WarpPlan {
  int units;    // up to which a kernel goes; its template argument: 32, 64 or 96
  int rows;     // of the batch, per block: 1, 2 or 4
  int threads;  // of a block
};

// Blocks that run rows on their own (block/).
struct BlockPlan {
  int units;    // up to which a kernel goes; its template argument: 32, 64 or 128
  int threads;  // a warp per 16 units
  int rows;     // of the batch, per block: 4 or 8
};

// Groups of blocks for many rows (warpgroup/). They divide tiles of 64 rows and never
// communicate.
struct WarpgroupPlan {
  int units;    // of a block: 8 or 16 in float, 16 or 32 in 16 bits
  int members;  // blocks of a group, which holds all of W_h
  int groups;
  int turns;   // tiles that each of a block's two warpgroups runs at a time
  int stages;  // of a warpgroup's ring
  int shared_bytes;
};

// Clusters for many rows (warpgroup/). Those of a group divide the units, and the
// groups divide tiles of 64 rows.
struct WarpgroupBackwardPlan {
  int split;  // blocks of a cluster, which divide the sum over gates and units: 4 or 8
  int tiles;  // of units, a cluster each
  int groups;
  int k_blocks;  // of a block
  int turns;     // as above
  int stages;
  int shared_bytes;
};

enum class RecurrentKernel {
  kSteps,  // none of these: a product and a kernel for each step
  kWarp,
  kBlock,
  kCluster,
  kGrid,
  kWarpgroup,
};

// How a layer is computed, as decided by plan_recurrent. Of the families' plans only the kernel's
// own counts.
struct RecurrentPlan {
  RecurrentKernel kernel = RecurrentKernel::kSteps;
  bool steps_faster_in_tf32 = false;  // where products may have TF32's accuracy
  int heads = 1;                      // of plan_recurrent_kernel
  int64_t workspace = 0;              // bytes
  WarpPlan warp{};
  BlockPlan block{};
  ClusterPlan cluster{};
  GridPlan grid{};
  WarpgroupPlan warpgroup{};
  WarpgroupBackwardPlan warpgroup_backward{};
};

#ifdef MY_OPS_WITH_CUDA

template <typename Cell, typename T, typename Acc>
cudaError_t recurrent_step(const RecurrentStep<T, Acc>& args, cudaStream_t stream);
template <typename Cell, typename T, typename Acc>
cudaError_t recurrent_step_backward(const RecurrentStepBackward<T, Acc>& args, cudaStream_t stream);

// One of the structs Ragged...
template <typename Ragged>
cudaError_t ragged(const Ragged& args, cudaStream_t stream);

// Persistent kernels: one launch runs all time steps. The input gates and the weight gradients
// are large products outside these launches. Defined for T = float, __half and __nv_bfloat16. Sums,
// gates and carried values are float for every T. Float results have float accuracy, with these
// exceptions. A weight or h0 that is infinite, or within 2^-12 of the largest float, and gradients
// of the gates from 2^112 on may give infinity or NaN. With many rows on Hopper, products have an
// absolute error of 2^-49 of the largest element of a row times that of a row or column of w_h: a
// row of h counts as at least 1, and as its largest h0 while a part of that remains. NaN and
// infinity in an input give NaN or infinity, never a hang. The same inputs on the same device give
// the same bits.
//
// Every pointer is aligned to 16 bytes except the biases, vectors, reset and w_h, which only need
// the alignment of their type (a w_h whose rows start at multiples of 16 bytes loads faster).
// Nothing may alias.
template <typename T>
struct RecurrentSequence {
  const float* gates_x;  // [steps, batch, kGates, hidden]
  const T* bias_x;       // [kGates, hidden] of the input gates, or null
  const T* bias_h;       // [kGates, hidden] of the product with h, or null
  const T* vectors;      // [kVectors, hidden]
  const T* w_h;          // [kGates * hidden, hidden], consecutive rows w_row elements apart
  int64_t w_row;
  const T* h0;        // [batch, hidden]
  const T* carried0;  // [batch, kCarried, hidden]
  const bool* reset;  // [steps, batch], false beyond a row's end, or null
  const T* zoneout;   // [steps, batch, hidden], or null
  T* output;          // [steps, batch, hidden]            h of every step
  T* h_n;             // [batch, hidden]                   of the last step
  T* carried_n;       // [batch, kCarried, hidden]         of the last step
  T* saved;           // [steps, batch, kSaved, hidden]    for backward; null in inference
  T* carried;  // [steps, batch, kCarried, hidden]  of every step; null if and only if saved is
  int64_t steps;
  int64_t batch;
  int64_t hidden;
};

// Gradients of the recurrence. grad_terms is the input of the products for weights, bias and x.
template <typename T>
struct RecurrentSequenceBackward {
  const T* grad_output;     // [steps, batch, hidden], or null for zeros
  const T* grad_h_n;        // [batch, hidden], or null for zeros
  const T* grad_carried_n;  // [batch, kCarried, hidden], or null for zeros
  const T* saved;           // [steps, batch, kSaved, hidden]    as saved by the forward pass
  const T* carried;         // [steps, batch, kCarried, hidden]
  const T* output;          // [steps, batch, hidden] of forward; kReadsH
  const T* h0;              // [batch, hidden]; kReadsH
  const T* carried0;        // [batch, kCarried, hidden]; kReadsPrevious
  const T* w_h;             // [kGates * hidden, hidden], consecutive rows w_row elements apart
  int64_t w_row;
  const bool* reset;  // [steps, batch], or null
  const T* zoneout;   // [steps, batch, hidden], or null
  float* grad_kept;   // [batch, hidden] of scratch; zoneout
  T* grad_terms;      // [steps, batch, kTerms, hidden] by stored_term, before the activations
  T* grad_h0;         // [batch, hidden]
  T* grad_carried0;   // [batch, kCarried, hidden]
  int64_t steps;
  int64_t batch;
  int64_t hidden;
};

// The gradients of the input and of the parameters, from those of the terms, in one launch: for few
// rows, where separate products would mostly wait for their launches. T is float, double, __half or
// __nv_bfloat16; every sum has the type of the arithmetic. The input gates' part of the terms
// belongs to the weights w_x, the product with h to those of h. Nothing may alias.
template <typename T>
struct RecurrentWeightsBackward {
  const T* grad_terms;  // [steps, batch, terms, hidden] by stored_term
  const T* input;       // [steps, batch, inputs]
  int64_t input_step, input_row, input_col;
  const T* h0;        // [batch, hidden]
  const T* output;    // [steps, batch, hidden] of forward
  const bool* reset;  // [steps, batch], or null
  const T* w_x;       // [gates * hidden, inputs]; grad_input
  int64_t w_row, w_col;
  T* grad_input;   // [steps, batch, inputs], or null
  T* grad_w_x;     // [gates * hidden, inputs]
  T* grad_w_h;     // [gates * hidden, hidden]
  T* grad_bias_x;  // [gates, hidden]
  T* grad_bias_h;  // [gates, hidden]
  int64_t steps, batch, inputs, hidden, gates, terms;
};
// Whether one launch is faster: `rows` are those of all steps, `columns` of grad_terms.
bool recurrent_weights_backward_faster(int64_t rows, int64_t columns, int64_t inputs,
                                       int64_t hidden);
template <typename T>
cudaError_t recurrent_weights_backward(const RecurrentWeightsBackward<T>& args,
                                       cudaStream_t stream);

// Returns the plan for the current device. Its kernel is kSteps if one launch for all steps is not
// possible or not faster. Negative sizes are refused (cudaErrorInvalidValue).
template <typename Cell, typename T>
cudaError_t plan_recurrent(Pass pass, int64_t steps, int64_t batch, int64_t hidden,
                           RecurrentPlan* plan);

// These run a plan for these arguments, on the device it was made for; its kernel must not be
// kSteps. They can be captured. workspace: plan.workspace bytes, 16-byte aligned, which the
// launcher initialises. Launches that may overlap need one each.
template <typename Cell, typename T>
cudaError_t recurrent_sequence(const RecurrentSequence<T>& args, const RecurrentPlan& plan,
                               void* workspace, cudaStream_t stream);
template <typename Cell, typename T>
cudaError_t recurrent_sequence_backward(const RecurrentSequenceBackward<T>& args,
                                        const RecurrentPlan& plan, void* workspace,
                                        cudaStream_t stream);

// The same for a cell that a program has defined, whose kernels are compiled at run time, from
// kernels/recurrent/nvrtc.cuh. The plan is one of kernels other than warpgroups', and its kernel is
// FAMILY_forward_kernel or FAMILY_backward_kernel<Cell, T, sizes...>; family is null for kSteps,
// and a size of 0 is none. A null device is the current one.
//
// With more than one head, which divide the units, the kernel is that of Headed<Cell>: the launch
// runs all heads side by side, and w_h is [kGates * hidden, hidden / heads].
struct DeviceFacts;  // device.h
struct KernelName {
  const char* family;
  int sizes[3];
};
cudaError_t plan_recurrent_kernel(const CellFacts& cell, Pass pass, int width, int64_t steps,
                                  int64_t batch, int64_t hidden, int heads,
                                  const DeviceFacts* device, RecurrentPlan* plan, KernelName* name);
// `kernel` was loaded, for this plan, from such machine code, and its pass is that of the
// arguments, whose arrays have its types. The code stays loaded. A plan that the device does not
// hold is refused (cudaErrorNotSupported).
cudaError_t load_recurrent_kernel(const void* code, const char* name, const RecurrentPlan& plan,
                                  const void** kernel);
template <typename Sequence>
cudaError_t launch_recurrent_kernel(const void* kernel, const Sequence& args,
                                    const RecurrentPlan& plan, void* workspace,
                                    cudaStream_t stream);

#endif

}  // namespace cuda

}  // namespace my_ops
