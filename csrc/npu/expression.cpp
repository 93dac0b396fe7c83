#include "expression.h"

#include <algorithm>
#include <stdexcept>

namespace fasttps::npu {

struct Expression::Node {
  Op op;
  int64_t number;  // the constant, or which scalar or index
  std::shared_ptr<const Node> left;
  std::shared_ptr<const Node> right;
};

namespace {

using Op = Expression::Op;

int64_t floor_quotient(int64_t a, int64_t b) {
  if (b == 0) throw std::domain_error("expression: a division by zero");
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

int64_t apply(Op op, int64_t a, int64_t b) {
  switch (op) {
    case Op::kAdd:
      return a + b;
    case Op::kSubtract:
      return a - b;
    case Op::kMultiply:
      return a * b;
    case Op::kFloorDivide:
      return floor_quotient(a, b);
    case Op::kModulo:
      return a - floor_quotient(a, b) * b;
    case Op::kMin:
      return std::min(a, b);
    case Op::kMax:
      return std::max(a, b);
    default:
      throw std::logic_error("expression: no operation");
  }
}

int64_t given(std::span<const int64_t> values, int64_t which, const char* what) {
  if (which < 0 || which >= static_cast<int64_t>(values.size())) {
    throw std::out_of_range(std::string("expression: wanted ") + what + " " +
                            std::to_string(which) + " of " + std::to_string(values.size()));
  }
  return values[static_cast<size_t>(which)];
}

// How tightly an operation binds; names of functions tightest.
int precedence(Op op) {
  switch (op) {
    case Op::kAdd:
    case Op::kSubtract:
      return 1;
    case Op::kMultiply:
    case Op::kFloorDivide:
    case Op::kModulo:
      return 2;
    default:
      return 3;
  }
}

}  // namespace

Expression::Expression(int64_t value)
    : node_(std::make_shared<const Node>(Node{Op::kConstant, value, nullptr, nullptr})) {}

Expression::Expression(std::shared_ptr<const Node> node) : node_(std::move(node)) {}

Expression Expression::scalar(int which) {
  return Expression(std::make_shared<const Node>(Node{Op::kScalar, which, nullptr, nullptr}));
}

Expression Expression::index(int loop) {
  return Expression(std::make_shared<const Node>(Node{Op::kIndex, loop, nullptr, nullptr}));
}

Expression Expression::of(Op op, const Expression& a, const Expression& b) {
  if (a.is_constant() && b.is_constant()) return apply(op, a.constant(), b.constant());
  const auto is = [](const Expression& x, int64_t value) {
    return x.is_constant() && x.constant() == value;
  };
  const bool sum = op == Op::kAdd || op == Op::kSubtract;
  if (is(b, sum ? 0 : 1) && (sum || op == Op::kMultiply || op == Op::kFloorDivide)) return a;
  if (op == Op::kAdd && is(a, 0)) return b;
  if (op == Op::kMultiply && is(a, 1)) return b;
  if (op == Op::kMultiply && (is(a, 0) || is(b, 0))) return 0;
  return Expression(std::make_shared<const Node>(Node{op, 0, a.node_, b.node_}));
}

bool Expression::is_constant() const { return node_->op == Op::kConstant; }

int64_t Expression::constant() const {
  if (!is_constant()) throw std::logic_error("expression: wanted a constant, got " + text({}));
  return node_->number;
}

int64_t Expression::value(std::span<const int64_t> scalars,
                          std::span<const int64_t> indices) const {
  // Of a node, without sharing it: a simulation asks a million times.
  const auto of = [&](const auto& self, const Node& node) -> int64_t {
    switch (node.op) {
      case Op::kConstant:
        return node.number;
      case Op::kScalar:
        return given(scalars, node.number, "scalar");
      case Op::kIndex:
        return given(indices, node.number, "index");
      default:
        return apply(node.op, self(self, *node.left), self(self, *node.right));
    }
  };
  return of(of, *node_);
}

std::string Expression::text(std::span<const std::string> names) const {
  const auto of = [&](const auto& self, const Node& node, int outer) -> std::string {
    const auto call = [&](const char* name) {
      return name + ("(" + self(self, *node.left, 0)) + ", " + self(self, *node.right, 0) + ")";
    };
    const auto infix = [&](const char* sign) {
      const int own = precedence(node.op);
      // The right side of a minus, a division or a remainder keeps its parentheses.
      const std::string text =
          self(self, *node.left, own) + sign + self(self, *node.right, own + 1);
      return own < outer ? "(" + text + ")" : text;
    };
    switch (node.op) {
      case Op::kConstant:
        return std::to_string(node.number);
      case Op::kScalar:
        return node.number < static_cast<int64_t>(names.size())
                   ? names[static_cast<size_t>(node.number)]
                   : "s" + std::to_string(node.number);
      case Op::kIndex:
        return "i" + std::to_string(node.number);
      case Op::kAdd:
        return infix(" + ");
      case Op::kSubtract:
        return infix(" - ");
      case Op::kMultiply:
        return infix(" * ");
      case Op::kFloorDivide:
        return infix(" / ");
      case Op::kModulo:
        return infix(" % ");
      case Op::kMin:
        return call("min");
      case Op::kMax:
        return call("max");
    }
    throw std::logic_error("expression: no operation");
  };
  return of(of, *node_, 0);
}

Expression::Op Expression::op() const { return node_->op; }
int64_t Expression::number() const { return node_->number; }

Expression Expression::left() const {
  if (!node_->left) throw std::logic_error("expression: no operands");
  return Expression(node_->left);
}

Expression Expression::right() const {
  if (!node_->right) throw std::logic_error("expression: no operands");
  return Expression(node_->right);
}

Expression operator+(const Expression& a, const Expression& b) {
  return Expression::of(Op::kAdd, a, b);
}
Expression operator-(const Expression& a, const Expression& b) {
  return Expression::of(Op::kSubtract, a, b);
}
Expression operator*(const Expression& a, const Expression& b) {
  return Expression::of(Op::kMultiply, a, b);
}
Expression floor_div(const Expression& a, const Expression& b) {
  return Expression::of(Op::kFloorDivide, a, b);
}
Expression modulo(const Expression& a, const Expression& b) {
  return Expression::of(Op::kModulo, a, b);
}
Expression min(const Expression& a, const Expression& b) { return Expression::of(Op::kMin, a, b); }
Expression max(const Expression& a, const Expression& b) { return Expression::of(Op::kMax, a, b); }
Expression ceil_div(const Expression& a, const Expression& b) { return floor_div(a + b - 1, b); }

}  // namespace fasttps::npu
