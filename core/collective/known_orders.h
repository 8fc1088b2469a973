// The orders of gangs that have been found: a trainer has a handful of gangs, again and again.
//
// A gang is known by its signature: all that its order depends on, as bytes that are no other
// gang's. Where ranks make the same calls it has a few for each run, however many calls that has.
//
// Threads: thread-compatible. Ownership: values. Errors: none.
#ifndef CHORUS_CORE_COLLECTIVE_KNOWN_ORDERS_H_
#define CHORUS_CORE_COLLECTIVE_KNOWN_ORDERS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "core/base/bytes.h"
#include "core/base/ids.h"
#include "core/collective/gang_order.h"

namespace chorus {

// Numbers as bytes; of numbers that follow each other the first one and how many there are.
class SignatureWriter {
 public:
  explicit SignatureWriter(ByteWriter* out) : out_(out) {}
  // Numbers of one list, then End().
  void Put(int64_t number) {
    if (count_ > 0 && number == first_ + count_) {
      ++count_;
      return;
    }
    Flush();
    first_ = number;
    count_ = 1;
  }
  void End() {
    Flush();
    out_->PutVarint(0);
  }
  void PutFingerprint(const Hash128& hash) {
    out_->Put(hash.hi);
    out_->Put(hash.lo);
  }

 private:
  void Flush() {
    if (count_ == 0) return;
    out_->PutVarint(static_cast<uint64_t>(count_));
    out_->PutSigned(first_);
    count_ = 0;
  }

  ByteWriter* const out_;
  int64_t first_ = 0;
  int64_t count_ = 0;
};

class KnownOrders {
 public:
  // What is kept takes no more, all together; an order of more than half of it is not kept beyond
  // the next Keep().
  static constexpr size_t kMostBytes = size_t{64} << 10;

  // Null: it is not known. Valid until Keep().
  const GangOrder* Find(const std::string& signature) const;
  // Returns the order. All others go where there is no room for it.
  const GangOrder* Keep(const std::string& signature, GangOrder order);

  // Of all that is here, from above.
  size_t bytes() const { return bytes_ + not_kept_bytes_; }
  size_t size() const { return orders_.size(); }

 private:
  absl::flat_hash_map<std::string, GangOrder> orders_;
  size_t bytes_ = 0;
  GangOrder not_kept_;  // the last one, if it is not
  size_t not_kept_bytes_ = 0;
};

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_KNOWN_ORDERS_H_
