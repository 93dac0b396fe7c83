#include <map>
#include <nlohmann/json.hpp>

#include "statistics.h"

namespace fasttps::npu::sim {

std::string trace_json(const std::vector<TraceEvent>& events) {
  nlohmann::json list = nlohmann::json::array();
  std::map<std::string, int> tracks;
  for (const TraceEvent& event : events) {
    const auto [track, is_new] = tracks.emplace(event.track, static_cast<int>(tracks.size()) + 1);
    if (is_new) {
      list.push_back({{"name", "thread_name"},
                      {"ph", "M"},
                      {"pid", 1},
                      {"tid", track->second},
                      {"args", {{"name", event.track}}}});
    }
    list.push_back({{"name", event.name},
                    {"ph", "X"},
                    {"ts", static_cast<double>(event.begin) * 1e-6},
                    {"dur", static_cast<double>(event.end - event.begin) * 1e-6},
                    {"pid", 1},
                    {"tid", track->second}});
  }
  return nlohmann::json{{"traceEvents", list}, {"displayTimeUnit", "ns"}}.dump();
}

}  // namespace fasttps::npu::sim
