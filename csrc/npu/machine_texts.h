#pragma once
#include <string_view>
#include <vector>

// What the build puts in from machines/*.json and machines/fits/*.json.
namespace fasttps::npu {

struct NamedText {
  std::string_view name;
  std::string_view json;
};

const std::vector<NamedText>& machines_texts();
const std::vector<NamedText>& fits_texts();

}  // namespace fasttps::npu
