// Which dtypes and shapes an operator takes, for sizes that are known, bounded or open alike.
//
// Every function returns "" where the operands are taken, else what is wrong with them, worded as in moetrt.spec:
// "input NAME was THIS; THAT is taken".
#ifndef MOETRT_PLUGIN_OPERAND_CHECK_H
#define MOETRT_PLUGIN_OPERAND_CHECK_H

#include <NvInferRuntime.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "operator_table.h"

namespace moetrt {

/// What is known of one dimension: it lies in [low, high]. The default is a dimension of which nothing is known.
struct Extent {
    int64_t low = 0;
    int64_t high = std::numeric_limits<int64_t>::max();

    bool fixed() const { return low == high; }
};

using Shape = std::vector<Extent>;

/// The inputs that a node has, with their positions, made once from its attributes.
class InputList {
public:
    InputList(const OperatorSpec& spec, const Attributes& attributes);

    int32_t count() const { return static_cast<int32_t>(present_.size()); }
    const InputSpec& at(int32_t position) const { return *present_[static_cast<size_t>(position)]; }
    bool has(Input input) const { return position(input) >= 0; }
    /// -1 where the node has no such input.
    int32_t position(Input input) const { return positions_[static_cast<size_t>(input)]; }
    /// "gemm2_permuted, expert_weights, gamma"
    std::string names() const;

private:
    std::vector<const InputSpec*> present_;
    std::array<int32_t, kInputCount> positions_;
};

/// "bfloat16", "int64", ...
std::string dtypeName(nvinfer1::DataType dtype);

/// Whether `dtype` is taken for `input` beside rows (gemm2_permuted) of dtype `data`.
bool dtypeTaken(const InputSpec& input, nvinfer1::DataType dtype, nvinfer1::DataType data);

std::string checkInputCount(const InputList& inputs, int32_t count);
/// `dtypes` has one entry for each input.
std::string checkDtypes(const InputList& inputs, const nvinfer1::DataType* dtypes);
/// `shapes` has one entry for each input; a shape is refused only where no size within its extents is taken.
std::string checkShapes(const InputList& inputs, const std::vector<Shape>& shapes);

}  // namespace moetrt

#endif
