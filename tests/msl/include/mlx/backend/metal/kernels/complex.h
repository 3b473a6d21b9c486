// In place of MLX's complex.h, whose constructors are overloaded by address space.
#pragma once
#include <metal_stdlib>
using namespace metal;
template <typename T> struct complex_t {
  T real, imag;
  constexpr complex_t(T real = 0, T imag = 0) : real(real), imag(imag) {}
};
using complex64_t = complex_t<float>;
