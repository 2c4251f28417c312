// All kernels, written once on the sixteen lanes of simd_*.h; included by each isa_*.cpp.
#include "lanes.inl"
#include "elementwise.inl"
#include "choose.inl"
#include "qkv.inl"
#include "dense.inl"
#if defined(TM_AMX)
#include "amx.inl"
#endif
#include "sparse.inl"
#include "attention.inl"
#include "quantised.inl"
#include "linear.inl"
#include "recurrent.inl"
#include "adapters.inl"

namespace tokenmill {

#define TM_JOIN2(a, b) a##b
#define TM_JOIN(a, b) TM_JOIN2(a, b)
const Table TM_JOIN(table_, TM_NS) = {
    TM_NS::norm, TM_NS::act, TM_NS::add_scaled, TM_NS::weigh, TM_NS::embed, TM_NS::greedy, TM_NS::choose,
    TM_NS::widen, TM_NS::linear, TM_NS::prepare, TM_NS::attention, TM_NS::short_conv, TM_NS::delta_rule,
    TM_NS::shrink, TM_NS::expand,
    TM_NS::gated_norm, TM_NS::state_space, TM_NS::selective_scan,
};

}  // namespace tokenmill
