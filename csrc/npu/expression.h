#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace fasttps::npu {

// An integer that is known when a program runs, not when it is made: a scalar argument of the call
// (the token's position), the index of a loop of a core's body, or what follows from them.
//   loop.count = ceil_div(scalar(0) + 1, 64)
// Values are shared and never change.
class Expression {
 public:
  enum class Op {
    kConstant,
    kScalar,
    kIndex,
    kAdd,
    kSubtract,
    kMultiply,
    kFloorDivide,
    kModulo,
    kMin,
    kMax
  };

  Expression(int64_t value = 0);        // NOLINT(google-explicit-constructor)
  static Expression scalar(int which);  // which of the program's scalars
  static Expression index(int loop);    // of the loop that was given this number

  // Where it depends on neither scalars nor indices.
  bool is_constant() const;
  int64_t constant() const;  // throws std::logic_error where it is not

  // With the values of all scalars, and of the loops that it stands in.
  // Throws std::out_of_range for one that is not given, std::domain_error for a division by zero.
  int64_t value(std::span<const int64_t> scalars, std::span<const int64_t> indices) const;

  // As a person writes it: (position + 1) * 64; names: of the scalars. Indices are i0, i1, ...
  std::string text(std::span<const std::string> names) const;

  // Its parts, for whoever translates it: the two operands, or the constant, scalar or index.
  Op op() const;
  int64_t number() const;
  Expression left() const;
  Expression right() const;

  friend Expression operator+(const Expression& a, const Expression& b);
  friend Expression operator-(const Expression& a, const Expression& b);
  friend Expression operator*(const Expression& a, const Expression& b);
  friend Expression floor_div(const Expression& a, const Expression& b);
  friend Expression modulo(const Expression& a, const Expression& b);
  friend Expression min(const Expression& a, const Expression& b);
  friend Expression max(const Expression& a, const Expression& b);

 private:
  struct Node;
  explicit Expression(std::shared_ptr<const Node> node);
  static Expression of(Op op, const Expression& a, const Expression& b);

  std::shared_ptr<const Node> node_;
};

Expression floor_div(const Expression& a, const Expression& b);
Expression modulo(const Expression& a, const Expression& b);
Expression min(const Expression& a, const Expression& b);
Expression max(const Expression& a, const Expression& b);
Expression ceil_div(const Expression& a, const Expression& b);

}  // namespace fasttps::npu
