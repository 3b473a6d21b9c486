// In place of MLX's logging.h.
#pragma once
namespace mlx {
struct os_log {
  template <typename... A> void log_debug(A...) const {}
};
}  // namespace mlx
