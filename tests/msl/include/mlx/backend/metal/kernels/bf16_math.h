// In place of MLX's bf16_math.h: bfloat functions are in metal_stdlib.
#pragma once
