#ifndef RAPT_SERVER_WIRE_TURN_QUEUE_H_
#define RAPT_SERVER_WIRE_TURN_QUEUE_H_

#include <cstddef>
#include <deque>
#include <list>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "server/wire/connection_counts.h"

namespace rapt {

// Items that wait for their turn. Networks have their turns in order, for one item each; the items
// of a network leave in the order in which they came. Not thread-safe.
template <typename Item>
class TurnQueue {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }

  void Push(const PeerNetwork& network, Item item) {
    std::list<Item>& items = items_[network];
    if (items.empty()) turns_.push_back(network);
    items.push_back(std::move(item));
    ++size_;
  }

  // REQUIRES: !empty().
  Item Pop() {
    const auto found = items_.find(turns_.front());
    std::list<Item>& items = found->second;
    Item item = std::move(items.front());
    items.pop_front();
    if (!items.empty()) turns_.push_back(turns_.front());
    turns_.pop_front();
    if (items.empty()) items_.erase(found);
    --size_;
    return item;
  }

 private:
  std::deque<PeerNetwork> turns_;                            // of the networks in items_
  absl::flat_hash_map<PeerNetwork, std::list<Item>> items_;  // without empty ones
  size_t size_ = 0;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_TURN_QUEUE_H_
