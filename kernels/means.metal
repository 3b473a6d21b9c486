// Means of whole pages of keys, one lane a coordinate.

const int n_means = params[13] / PAGE * D;
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int at = (threadgroup_position_in_grid.x * NSG + sg) * 32 + lane;
if (at < n_means) k_mean[at] = T(page_sum<PAGE, D>(keys + size_t(at / D) * PAGE * D + at % D) * (1.0f / PAGE));
