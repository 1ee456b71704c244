// Calls in two levels: stages inside a host over shared memory, stages between hosts over MPI.
//
// A call is cut into slices. Each is combined inside the host (`before`), goes between hosts
// (`across`, which only some ranks of a host take part in), and is fetched inside the host
// (`after`); `between` is work inside the host that need not wait for other hosts. While slices are
// under way between hosts, the next is combined: the thread that makes the call moves them whenever
// it waits inside the host. Stages inside the host have the same order on all its ranks.
//
// The first slice shows whether all ranks make this call: until it has, nothing else is sent
// between hosts, so a call that somebody refuses counts once on every rank.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string_view>
#include <vector>

#include "base/one_thread.h"
#include "engine/engine.h"
#include "transports/messages/message_engine.h"

namespace pycoll {

enum class StageArray : uint8_t { kIn = 0, kOut = 1, kScratch = 2 };

struct BoundStage {
  std::shared_ptr<const BoundCall> call;  // null: this rank has no part
  StageArray source = StageArray::kIn, target = StageArray::kOut;
};

struct StagedSlice {
  BoundStage before, across, between, after;
};

struct StagedCall {
  std::vector<StagedSlice> slices;
  uint64_t scratch_bytes = 0;
  bool hosts_first = true;  // otherwise: `before` only shows that a host's ranks agree, and
                            // `across` is for all ranks
};

// Threads: as Engine. Errors: those of the two engines; see failed_inside().
class TwoLevelEngine {
 public:
  static constexpr double kDefaultTimeout = -1;
  TwoLevelEngine(std::shared_ptr<Engine> node, std::shared_ptr<MessageEngine> flat);
  ~TwoLevelEngine();
  TwoLevelEngine(const TwoLevelEngine&) = delete;
  TwoLevelEngine& operator=(const TwoLevelEngine&) = delete;

  MessageEngine& flat() { return *flat_; }
  // Id of a call site, for both engines.
  uint32_t site(std::string_view text);
  // `in` and `out` are the user's arrays. Every rank hears of a refused call before this throws.
  void run(const StagedCall& call, const void* in, void* out, uint32_t site,
           double timeout_s = kDefaultTimeout);
  // Whether the last failure came from inside the host.
  bool failed_inside() const { return inside_; }
  // As Engine::trace; a call is one record, whatever its stages are.
  void trace(std::shared_ptr<Trace> trace);
  // Counts calls that wait their turn elsewhere; while there are any, none may be made here.
  void queue(int32_t change) { queued_ += change; }
  bool idle() const { return queued_ == 0; }
  // See Engine.
  void check_unused() const { Use::check_unused(user_, flat_->link().rank()); }

 private:
  struct Arrays {
    std::array<void*, 3> at;
    uint32_t here, there;
    double timeout_s;
  };
  void run_staged(const StagedCall& call, const void* in, void* out, uint32_t site,
                  double timeout_s);
  void run_slices(const StagedCall& call, const Arrays& arrays);
  void run_inside(const BoundStage& stage, const Arrays& arrays, double more_s = 0);
  void start(const BoundStage& stage, const Arrays& arrays);
  void rejected(const StagedCall& call, std::string_view text);

  std::shared_ptr<Engine> node_;
  std::shared_ptr<MessageEngine> flat_;
  std::vector<uint32_t> node_sites_;  // by id of flat_
  std::unique_ptr<char[]> scratch_;
  uint64_t scratch_bytes_ = 0;
  bool inside_ = false;   // the stage that runs, or ran last
  bool counted_ = false;  // the flat engine has counted the call
  std::atomic<int32_t> queued_{0};
  std::shared_ptr<Trace> trace_, stages_;  // stages_: of those inside the host, for their waits
  User user_{0};                           // the thread that is inside run
};

}  // namespace pycoll
