// What the parts of compare.cpp share: random numbers and the count of what was looked at.
#pragma once
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>

namespace tokenmill::compare {

struct Random {
  std::mt19937 bits;
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  bool coin() { return bits() & 1; }
  float value(float scale) { return std::normal_distribution<float>(0.0f, scale)(bits); }
  template <class T>
  T of(std::initializer_list<T> list) { return list.begin()[below(static_cast<int64_t>(list.size()))]; }
};

struct Counts {
  int checks = 0, failures = 0;
};
Counts& counts();
void fail(const std::string& what, const std::string& why);

void choices(Random& random);  // compare_choice.cpp: a token per line of logits, masked, likeliest or drawn
void steps(Random& random);    // and a decode step's integers

}  // namespace tokenmill::compare
