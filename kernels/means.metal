// Means of whole pages of keys, one lane a coordinate.

const int first = params[2], room = params[3], pages = params[7], n_means = params[13] / PAGE * D;
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int at = (threadgroup_position_in_grid.x * NSG + sg) * 32 + lane;
if (at >= n_means) return;

const int page = at / D;
const size_t from = size_t(page / pages) * room + first + page % pages * PAGE;
k_mean[at] = T(page_sum<PAGE, D>(keys + from * D + at % D) * (1.0f / PAGE));
