#include "runtime/internode.hpp"

#include <algorithm>
#include <cstring>

namespace moecomm {

constexpr const char* kRowsPhase = "rows from another node";

Internode::Internode(const WindowLayout& layout, int32_t rank, std::vector<std::byte*> bases,
                     shm::Signals& signals, std::unique_ptr<Transport> transport,
                     std::unique_ptr<tcp::Links> links, double timeout_seconds, uint64_t first_epoch)
    : layout_(layout),
      nodes_(layout.shape.nodes()),
      rank_(rank),
      node_(nodes_.node_of(rank)),
      others_(nodes_.nodes() - 1),
      bases_(std::move(bases)),
      signals_(signals),
      slot_target_(layout.shape.staging_chunks(), -1),
      proxy_(layout, rank, own(), signals, std::move(transport), std::move(links), timeout_seconds,
             first_epoch) {}

void Internode::push_pieces(Command::Kind kind, int32_t other, int64_t bytes, uint64_t epoch) {
  for (int64_t piece = 0; piece < WindowShape::pieces(bytes); ++piece)
    proxy_.push(
        {kind, static_cast<uint8_t>(epoch), static_cast<uint16_t>(other), static_cast<uint32_t>(piece),
         static_cast<uint32_t>(std::min(WindowShape::kPieceBytes, bytes - piece * WindowShape::kPieceBytes)),
         0});
}

void Internode::announce(const SignalRecord& record, const RelayRoutes* routes, const char* text) {
  const WindowShape& shape = layout_.shape;
  const int64_t entries = int64_t{record.tokens} * shape.top_k;
  for (int32_t i = 0; i < others_; ++i) {
    const int32_t other = (node_ + i) % others_;  // nodes start with different targets
    auto* const announcement = reinterpret_cast<Announcement*>(
        own() + WindowLayout::relayed_head(layout_.announcement[record.epoch & 1], other));
    announcement->record = record;
    announcement->rows = routes == nullptr ? 0 : static_cast<int64_t>(routes->tokens[other].size());
    announcement->parts = static_cast<uint64_t>(shape.chunks(announcement->rows));
    int64_t bytes = offsetof(Announcement, text);
    if (text != nullptr) {
      std::memcpy(announcement->text, text, kErrorText);
      bytes = sizeof(Announcement);
    }
    proxy_.push({Command::Kind::head, static_cast<uint8_t>(record.epoch), static_cast<uint16_t>(other), 0,
                 static_cast<uint32_t>(bytes), 0});
    if (record.operation != Operation::dispatch) continue;
    push_pieces(Command::Kind::ids, other, entries * 4, record.epoch);
    if ((record.carries & kCarriesWeights) != 0)
      push_pieces(Command::Kind::weights, other, entries * weight_bytes(shape.dtype), record.epoch);
  }
}

int64_t Internode::take_slot(int32_t other, uint64_t epoch) {
  const auto slots = static_cast<uint64_t>(layout_.shape.staging_chunks());
  const auto slot = static_cast<int64_t>(staged_ % slots);
  const uint64_t uses = staged_++ / slots;
  int32_t& target = slot_target_[slot];
  if (uses > 0) {
    const int32_t peer = rail(target);
    signals_.wait_word(proxy_.staging_done(slot), uses, peer, peer, epoch, "room to send to another node");
  }
  target = other;
  return slot;
}

void Internode::push_chunk(int32_t other, int64_t chunk, int64_t slot, int64_t rows, uint64_t epoch) {
  const auto count = static_cast<uint32_t>(rows);
  proxy_.push({Command::Kind::chunk, static_cast<uint8_t>(epoch), static_cast<uint16_t>(other),
               static_cast<uint32_t>(chunk), static_cast<uint32_t>(slot), count << 16 | count});
}

void Internode::send_rows(const cpu::Context& context, const RelayRoutes& routes, const std::byte* x,
                          uint64_t epoch) {
  const int64_t chunk_rows = layout_.shape.chunk_rows(),
                chunks = layout_.shape.chunks(layout_.shape.max_tokens);
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    for (int32_t i = 0; i < others_; ++i) {
      const int32_t other = (node_ + i) % others_;
      const auto& tokens = routes.tokens[other];
      const int64_t first = chunk * chunk_rows,
                    rows = std::min(chunk_rows, static_cast<int64_t>(tokens.size()) - first);
      if (rows <= 0) continue;
      const int64_t slot = take_slot(other, epoch);
      cpu::dispatch_send_chunk(context, x, std::span(tokens).subspan(first, rows), staging(slot));
      push_chunk(other, chunk, slot, rows, epoch);
    }
}

void Internode::wait_all_here(uint64_t epoch) {
  for (int32_t other = 0; other < others_; ++other)
    signals_.wait_word(proxy_.all_here(other), epoch, rail(other), rail(other), epoch, kRowsPhase);
}

void Internode::wait_part(int32_t source, int64_t flag, uint64_t epoch, const char* phase) {
  const int32_t through = nodes_.rank_of(node_, nodes_.local_of(source));
  auto* const word =
      reinterpret_cast<uint64_t*>(window_of(source) + layout_.arrival(epoch, other_of(source), flag));
  signals_.wait_word(word, epoch, source, through, epoch, phase);
}

void Internode::pull(const Plan& plan, uint64_t epoch, const std::function<void(cpu::EntryRange)>& pull) {
  const int64_t chunk_rows = layout_.shape.chunk_rows(),
                chunks = layout_.shape.chunks(layout_.shape.max_tokens);
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    for (int32_t i = 0; i < nodes_.ranks; ++i) {
      const int32_t source = (rank_ + i) % nodes_.ranks;
      const int64_t first = chunk * chunk_rows;
      if (nodes_.same_node(source, rank_) || first >= plan.relayed[source]) continue;
      const cpu::EntryRange range = cpu::entries_between(plan, source, first, first + chunk_rows);
      if (range.begin == range.end) continue;
      wait_part(source, chunk, epoch, kRowsPhase);
      pull(range);
    }
}

/// Works in rounds. In a round each rank of the node has one chunk to send on its rail. This rank sums its
/// rows for the other ranks' chunks, and writes these partial sums to them. Then it adds up the partial sums
/// of its own chunk of the previous round. Each rank has room for the partial sums of a few rounds.
void Internode::relay(const cpu::Context& context, const Plan& plan, const cpu::CombineArguments& arguments,
                      uint64_t epoch) {
  const int64_t chunk_rows = layout_.shape.chunk_rows(), row_bytes = layout_.shape.row_bytes();
  struct Task {
    int32_t other;
    int64_t chunk;
  };
  // Returns the chunks that rank `local` of this node adds up, by round. All ranks make the same lists.
  const auto tasks_of = [&](int32_t local) {
    std::vector<Task> tasks;
    for (int64_t chunk = 0; chunk < layout_.shape.chunks(layout_.shape.max_tokens); ++chunk)
      for (int32_t i = 0; i < others_; ++i) {
        const int32_t other = (node_ + i) % others_;
        if (chunk < layout_.shape.chunks(plan.relayed[rank_at(other, local)]))
          tasks.push_back({other, chunk});
      }
    return tasks;
  };
  std::vector<std::vector<Task>> tasks;
  size_t rounds = 0;
  for (int32_t local = 0; local < nodes_.local_ranks; ++local) {
    tasks.push_back(tasks_of(local));
    rounds = std::max(rounds, tasks.back().size());
  }
  const auto range = [&](const Task& task, int32_t local) {
    const int32_t home = rank_at(task.other, local);
    const int64_t first = task.chunk * chunk_rows;
    return std::pair(first, std::min(first + chunk_rows, plan.relayed[home]));
  };
  const auto partials = [&](int32_t local, uint64_t round) {
    const auto slot = static_cast<int64_t>(round % static_cast<uint64_t>(WindowLayout::kPartialRounds));
    return window(local) + layout_.partials + slot * chunk_rows * layout_.shape.slots() * row_bytes;
  };
  const auto counter = [&](uint64_t RelayProgress::* field) {
    return [this, field](int32_t rank) { return &(progress(rank).*field); };
  };

  const int32_t own_local = nodes_.local_of(rank_);
  const bool alone = nodes_.local_ranks == 1;
  constexpr auto kRounds = static_cast<uint64_t>(WindowLayout::kPartialRounds);
  const auto reduce = [&](size_t round) {
    const uint64_t number = rounds_ + round;  // counted over all operations
    if (number >= kRounds)
      signals_.wait_node(counter(&RelayProgress::summed), number - kRounds + 1, epoch, "sums of the node");
    for (int32_t i = 1; i < nodes_.local_ranks; ++i) {
      const int32_t local = (own_local + i) % nodes_.local_ranks;
      if (round >= tasks[local].size()) continue;
      const Task& task = tasks[local][round];
      const auto [first, end] = range(task, local);
      cpu::combine_reduce_relayed(context, plan, arguments, rank_at(task.other, local), first, end,
                                  partials(local, number));
    }
    signals_.store(&progress(rank_).reduced, number + 1);
  };
  const auto sum = [&](size_t round) {
    const uint64_t number = rounds_ + round;
    const auto& own_tasks = tasks[own_local];
    if (round < own_tasks.size()) {
      const Task& task = own_tasks[round];
      const auto [first, end] = range(task, own_local);
      const int64_t slot = take_slot(task.other, epoch);
      if (!alone) signals_.wait_node(counter(&RelayProgress::reduced), number + 1, epoch, "sums of the node");
      cpu::combine_sum_relayed(context, plan, arguments, task.other, first, end,
                               alone ? nullptr : partials(own_local, number), staging(slot));
      push_chunk(task.other, task.chunk, slot, end - first, epoch);
    }
    if (!alone) signals_.store(&progress(rank_).summed, number + 1);
  };
  for (size_t round = 0; round <= rounds; ++round) {
    if (round < rounds && !alone) reduce(round);
    if (round > 0) sum(round - 1);
  }
  rounds_ += rounds;
}

void Internode::node_barrier(uint64_t epoch) {
  signals_.store(&progress(rank_).pushed, epoch);
  signals_.wait_node([this](int32_t rank) { return &progress(rank).pushed; }, epoch, epoch,
                     "sums of the node");
}

void Internode::send_grads(const Plan& plan, uint64_t epoch) {
  for (int32_t other = 0; other < others_; ++other) {
    const int64_t entries = plan.source_tokens[rail(other)] * layout_.shape.top_k;
    push_pieces(Command::Kind::grads, other, entries * weight_bytes(layout_.shape.dtype), epoch);
  }
}

void Internode::wait_grads(const Plan& plan, uint64_t epoch) {
  const WindowShape& shape = layout_.shape;
  const int64_t bytes = plan.tokens * shape.top_k * weight_bytes(shape.dtype);
  for (int32_t other = 0; other < others_; ++other)
    for (int64_t piece = 0; piece < WindowShape::pieces(bytes); ++piece)
      wait_part(rail(other), shape.chunks(shape.max_tokens) + piece, epoch, "gradients from another node");
}

void Internode::combine_sum(const Plan& plan, uint64_t epoch,
                            const std::function<void(int64_t, int64_t)>& sum) {
  const int64_t chunk_rows = layout_.shape.chunk_rows();
  std::vector<int64_t> arrived(others_, 0);  // [other] chunks that are here
  for (int64_t first = 0; first < plan.tokens; first += chunk_rows) {
    const int64_t end = std::min(first + chunk_rows, plan.tokens);
    for (int32_t other = 0; other < others_; ++other) {
      const auto& tokens = plan.routes.tokens[other];
      const int64_t rows = std::lower_bound(tokens.begin(), tokens.end(), end) - tokens.begin();
      int64_t& chunk = arrived[other];
      for (; chunk < layout_.shape.chunks(rows); ++chunk)
        wait_part(rail(other), chunk, epoch, "sums from another node");
    }
    sum(first, end);
  }
}

}  // namespace moecomm
