// The calls that a rank has left before it knew that all ranks make them.
//
// With MessageOptions::early a rank leaves a call with a root, all of whose messages are small,
// when it has done its own part. Ranks count such calls alike, and mix what they were into the
// check of every later call: so the next call in which a rank depends on all others proves them
// all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace pycoll {

// One of them, as its rank tells others.
struct PastCall {
  uint32_t src = 0;
  uint64_t seq = 0, descriptor = 0, count = 0, check = 0;
  uint32_t site = 0;        // of one of its own, to the rank itself
  std::string site_text{};  // of one that another rank tells of

  // Whether two ranks have made the same call under one number.
  bool differs(const PastCall& other) const {
    return seq == other.seq &&
           (descriptor != other.descriptor || count != other.count || check != other.check);
  }
};

class UnprovenCalls {
 public:
  // A rank that is slow has the packets of so many calls to keep at most, and of the next.
  static constexpr size_t kMost = 8;

  bool empty() const { return calls_.empty(); }
  bool full() const { return calls_.size() >= kMost; }
  const std::vector<PastCall>& all() const { return calls_; }
  const PastCall* find(uint64_t seq) const {
    const auto same = [seq](const PastCall& call) { return call.seq == seq; };
    const auto found = std::find_if(calls_.begin(), calls_.end(), same);
    return found == calls_.end() ? nullptr : &*found;
  }
  // The check of a call behind these; that of its binding if there are none.
  uint32_t mixed(uint32_t check) const { return check ^ word_; }
  void add(PastCall call);
  void clear() {
    calls_.clear();
    word_ = 0;
  }

 private:
  std::vector<PastCall> calls_;  // the oldest first
  uint32_t word_ = 0;            // stands for all of them
};

}  // namespace pycoll
