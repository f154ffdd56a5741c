// Attention over cached and fresh rows.
#pragma once
#include "op.h"

namespace {

// q [B, H, T, C], cache [B, 1, S, R], fresh [B, 1, F, R], base [B], first [B] -> [B, H, T, latent];
// or, if `heads` is H, q [B, T, H * C] -> [B, T, H * latent].
//
// Query t sees the cache's rows before base and the fresh rows up to first + t, whose positions
// begin at base. written: the fresh rows are in the cache from base on. The cache may be bfloat16;
// fresh rows are then rounded to it already. A row has a key of C numbers for each of `groups`
// heads, and from number `values` on `latent` values for each, which may overlap the keys. H /
// groups adjacent query heads share a key.
//
// chosen [B, T, k], only for one group: a query sees only the rows at these positions, in their
// order. Positions that do not exist, such as -1, are skipped, but NO_NUMBER makes the result NaN.
// The result is that of attention over a cache of only these rows.
struct Attention : Usual {
  static constexpr const char* name = "Attention";
  static constexpr ort::Type inputs[] = {ort::FLOAT, ort::ANY,   ort::FLOAT,
                                         ort::INT64, ort::INT64, ort::INT64};
  static constexpr unsigned optional = 1 << 5;
  const Kernels& k;
  float scale;
  int64_t groups, values, latent, heads;
  bool written;

  Attention(const Kernels& k, const Attributes& from)
      : k(k),
        scale(from.real("scale")),
        groups(from.integer("groups")),
        values(from.integer("values")),
        latent(from.integer("latent")),
        heads(from.value_or<int64_t>("heads", 0)),
        written(from.integer("written") != 0) {}

  void compute(Call& call) const {
    Tensor q = call.input(0), cache = call.input(1);
    Tensor fresh = call.input(2), base = call.input(3);
    Tensor first = call.input(4);
    std::vector<int64_t> shape{q.shape};
    checked(q, cache, fresh);
    shape.back() = product(latent, std::max<int64_t>(heads, 1));
    float* y = call.output(shape);
    attend(call, q, cache, fresh, base, first, call.input(5, true), y);
  }

  // Does the same with operands of another operator.
  void attend(Call& call, const Tensor& q, const Tensor& cache, const Tensor& fresh,
              const Tensor& base, const Tensor& first, const Tensor& chosen, float* y) const {
    Job job = checked(q, cache, fresh);
    std::vector<int64_t> slots{job.slots};
    NEED(base.shape == slots && first.shape == slots, name, "no place for each slot");
    job.y = y;
    if (chosen.memory) return attend_to(call, job, base, chosen);
    std::vector<Lanes> lanes;
    int64_t most = 0, sixteens = up(job.queries(), LANES);
    for (int64_t i = 0; i < product(job.slots, groups, sixteens); i++) {
      lanes.push_back(look(job, i, base.data<int64_t>(), first.data<int64_t>()));
      most = std::max(most, lanes.back().end);
    }
    int64_t width = job.width + latent;
    run(call, job, lanes, product(job.slots, job.heads, job.tokens, most, width));
  }

 private:
  struct Job {
    int64_t slots, heads, tokens, width, stride, rows, fresh_rows, per_group;
    bool by_token;  // a token's heads are adjacent
    const float *q, *fresh;
    const void* cache;
    bool halves;  // the cache is bfloat16
    float* y;
    // Returns the row in q of a head of token m (of all slots), unless `by_token`.
    int64_t row(int64_t m, int64_t head) const {
      return (m / tokens * heads + head) * tokens + m % tokens;
    }
    // Returns the number of queries of a slot and a group; query i is of token i / per_group.
    int64_t queries() const { return per_group * tokens; }
    int64_t place(int64_t slot, int64_t group, int64_t query) const {
      int64_t head = group * per_group + query % per_group, token = query / per_group;
      if (by_token) return (slot * tokens + token) * heads + head;
      return (slot * heads + head) * tokens + token;
    }
  };
  // Up to 16 queries of a slot and a group.
  struct Lanes {
    int64_t slot, group, first, base, end;
    int32_t seen[LANES];
  };

  Job checked(const Tensor& q, const Tensor& cache, const Tensor& fresh) const {
    bool by_token = heads > 0;
    NEED(q.rank() == (by_token ? 3 : 4) && cache.rank() == 4 && fresh.rank() == 4, name,
         "operands have 4 axes, not " + q.text());
    NEED(!by_token || q.shape[2] % heads == 0, name, std::to_string(heads) + " heads, " + q.text());
    Job job{};
    job.slots = q.shape[0], job.by_token = by_token;
    job.heads = by_token ? heads : q.shape[1], job.tokens = q.shape[by_token ? 1 : 2];
    job.width = by_token ? q.shape[2] / heads : q.shape[3], job.stride = cache.shape[3];
    job.rows = cache.shape[2], job.fresh_rows = fresh.shape[2];
    auto fit = [&](const Tensor& rows) {
      return rows.shape[0] == job.slots && rows.shape[1] == 1 && rows.shape[3] == job.stride;
    };
    bool inside = groups > 0 && latent > 0 && values >= 0 && values <= job.stride &&
                  job.width > 0 && job.heads % groups == 0 &&
                  product(groups, job.width) <= job.stride &&
                  product(groups, latent) <= job.stride - values;
    NEED(fit(cache) && fit(fresh) && inside, name,
         "queries " + q.text() + " over " + cache.text() + " and " + fresh.text());
    NEED(job.rows <= INT32_MAX && job.fresh_rows <= INT32_MAX, name, "too many rows");
    job.per_group = job.heads / groups;
    job.halves = cache.type == ort::BFLOAT16;
    NEED(job.halves || cache.type == ort::FLOAT, name, "a cache of another type");
    job.q = q.data<float>(), job.cache = cache.memory, job.fresh = fresh.data<float>();
    return job;
  }

  // Returns which positions 16 queries see; clamped, as an idle slot may have any base and first.
  Lanes look(const Job& job, int64_t number, const int64_t* base, const int64_t* first) const {
    int64_t sixteens = up(job.queries(), LANES), group = number / sixteens;
    Lanes lanes{group / groups, group % groups, number % sixteens * LANES, 0, 0, {}};
    int64_t from = std::max<int64_t>(0, min(base[lanes.slot], job.rows));
    lanes.base = written ? job.rows : from;
    int64_t limit = written ? job.rows : min<int64_t>(from + job.fresh_rows, INT32_MAX);
    int64_t offset = std::max<int64_t>(0, min(first[lanes.slot], limit));
    for (int64_t i = 0; i < LANES && lanes.first + i < job.queries(); i++) {
      int64_t seen = min(limit, from + offset + (lanes.first + i) / job.per_group + 1);
      lanes.seen[i] = static_cast<int32_t>(seen);
      lanes.end = std::max(lanes.end, seen);
    }
    return lanes;
  }

  // Runs all lanes. Each is a task; if they are few, each split is a task. Sums are the same.
  void run(Call& call, const Job& job, const std::vector<Lanes>& lanes, int64_t work) const {
    int64_t count = static_cast<int64_t>(lanes.size()), splits = 1;
    for (const Lanes& each : lanes) splits = std::max(splits, up(each.end, mtp::SPLIT));
    int64_t size = (2 + latent) * LANES;
    if (count >= 16 || splits == 1) {
      tasks(call, count, work, [&](int64_t i) {
        auto parts = scratch<float>(2, size);
        attend_all(job, lanes[i], partial(&parts[0]), partial(&parts[size]));
        finish(job, lanes[i], partial(&parts[0]));
      });
      return;
    }
    auto parts = scratch<float>(count, splits, size);
    tasks(call, product(count, splits), work, [&](int64_t t) {
      if (t % splits == 0 || t % splits * mtp::SPLIT < lanes[t / splits].end)
        attend(job, lanes[t / splits], t % splits, partial(&parts[t * size]));
    });
    tasks(call, count, product(count, splits, latent, LANES), [&](int64_t i) {
      mtp::Partial into = partial(&parts[i * splits * size]);
      for (int64_t n = 1; n * mtp::SPLIT < lanes[i].end; n++)
        k.fold(into, partial(&parts[(i * splits + n) * size]), latent);
      finish(job, lanes[i], into);
    });
  }

  // Runs attention to chosen rows; splits become tasks as in `run`.
  void attend_to(Call& call, const Job& job, const Tensor& base, const Tensor& chosen) const {
    NEED(groups == 1 && !job.by_token && chosen.rank() == 3 && chosen.shape[0] == job.slots &&
             chosen.shape[1] == job.tokens && chosen.shape[2] > 0,
         name, "chosen rows " + chosen.text() + " of " + std::to_string(job.tokens) + " tokens");
    NEED(values == 0 && latent <= job.width, name,
         std::to_string(latent) + " values of chosen rows, which are " + std::to_string(job.width) +
             " wide");
    int64_t count = job.slots * job.tokens, most = chosen.shape[2];
    int64_t splits = up(most, mtp::SPLIT), size = product(up(job.heads, LANES), 2 + latent, LANES);
    int64_t work = product(count, most, job.heads, job.width + latent);
    if (count >= 16 || splits == 1) {
      tasks(call, count, work, [&](int64_t m) {
        auto parts = scratch<float>(2, size);
        attend_to(job, base, chosen, m, 0, &parts[0]);
        for (int64_t n = 1; n < splits; n++) {
          attend_to(job, base, chosen, m, n, &parts[size]);
          fold(job, &parts[0], &parts[size]);
        }
        finish(job, m, &parts[0]);
      });
      return;
    }
    auto parts = scratch<float>(count, splits, size);
    tasks(call, product(count, splits), work, [&](int64_t t) {
      attend_to(job, base, chosen, t / splits, t % splits, &parts[t * size]);
    });
    tasks(call, count, product(count, splits, size), [&](int64_t m) {
      float* into = &parts[m * splits * size];
      for (int64_t n = 1; n < splits; n++) fold(job, into, into + n * size);
      finish(job, m, into);
    });
  }

  // Runs a token's heads on a split of its chosen rows, which are copied to adjacent places.
  void attend_to(const Job& job, const Tensor& base, const Tensor& chosen, int64_t m, int64_t split,
                 float* parts) const {
    int64_t most = chosen.shape[2], begin = split * mtp::SPLIT, count = 0;
    int64_t end = min(most, begin + mtp::SPLIT), slot = m / job.tokens;
    auto rows = scratch<float>(end - begin, job.width);
    int64_t from = std::max<int64_t>(0, min(base.data<int64_t>()[slot], job.rows));
    for (int64_t i = begin; i < end; i++) {
      int64_t at = chosen.data<int64_t>()[m * most + i];
      count += copied(job, slot, from, at, &rows[count * job.width]);
    }
    for (int64_t head = 0; head < job.heads; head += LANES, parts += (2 + latent) * LANES) {
      int32_t seen[LANES];
      auto queries = scratch<float>(job.width, LANES);
      for (int64_t i = 0; i < LANES; i++) {
        bool there = head + i < job.heads;
        const float* row = job.q + (there ? job.row(m, head + i) * job.width : 0);
        for (int64_t c = 0; c < job.width; c++)
          queries[c * LANES + i] = there ? row[c] * scale : 0.0f;
        seen[i] = there ? static_cast<int32_t>(count) : 0;
      }
      mtp::Attention a{queries.get(), seen, &rows[0],  nullptr, nullptr, count,
                       job.width,     0,    job.width, 0,       latent};
      k.attend(a, 0, count, nullptr, partial(parts));
    }
  }

  // Copies the numbers of a row that attention reads; returns whether the row exists.
  bool copied(const Job& job, int64_t slot, int64_t base, int64_t at, float* to) const {
    int64_t old = written ? job.rows : base;
    if (at == NO_NUMBER) return std::fill_n(to, job.width, NAN), true;
    if (at < 0 || at >= (written ? old : old + job.fresh_rows)) return false;
    if (at >= old) {
      const float* row = job.fresh + (slot * job.fresh_rows + at - old) * job.stride;
      std::memcpy(to, row, job.width * sizeof(float));
      return true;
    }
    int64_t place = (slot * job.rows + at) * job.stride;
    if (!job.halves)
      std::memcpy(to, static_cast<const float*>(job.cache) + place, job.width * sizeof(float));
    for (int64_t i = 0; job.halves && i < job.width; i++)
      to[i] = mtp::wide(static_cast<const mtp::Bf16*>(job.cache)[place + i]);
    return true;
  }

  void fold(const Job& job, float* into, float* later) const {
    for (int64_t h = 0, at = 0; h < job.heads; h += LANES, at += (2 + latent) * LANES)
      k.fold(partial(into + at), partial(later + at), latent);
  }

  void finish(const Job& job, int64_t m, float* parts) const {
    for (int64_t head = 0; head < job.heads; head += LANES, parts += (2 + latent) * LANES) {
      mtp::Partial done = partial(parts);
      for (int64_t i = 0; i < LANES && head + i < job.heads; i++)
        finish(done, i, job.y + job.row(m, head + i) * latent);
    }
  }

  // Writes a lane's result.
  void finish(const mtp::Partial& done, int64_t lane, float* row) const {
    float total = done.total[lane], factor = total == 0.0f ? 0.0f : 1.0f / total;  // or NaN
    for (int64_t d = 0; d < latent; d++) row[d] = done.mixed[d * LANES + lane] * factor;
  }

  static mtp::Partial partial(float* memory) {
    return {memory, memory + LANES, memory + 2 * LANES};
  }

  void attend_all(const Job& job, const Lanes& lanes, mtp::Partial into, mtp::Partial next) const {
    attend(job, lanes, 0, into);
    for (int64_t n = 1; n * mtp::SPLIT < lanes.end; n++) {
      attend(job, lanes, n, next);
      k.fold(into, next, latent);
    }
  }

  void attend(const Job& job, const Lanes& lanes, int64_t split, const mtp::Partial& out) const {
    auto queries = scratch<float>(job.width, LANES);
    for (int64_t i = 0; i < LANES; i++) {
      bool there = lanes.first + i < job.queries();
      int64_t place = there ? job.place(lanes.slot, lanes.group, lanes.first + i) : 0;
      const float* row = job.q + place * job.width;
      for (int64_t c = 0; c < job.width; c++)
        queries[c * LANES + i] = there ? row[c] * scale : 0.0f;
    }
    int64_t begin = split * mtp::SPLIT, end = min(lanes.end, begin + mtp::SPLIT);
    bool meet = begin < lanes.base && lanes.base < end;
    auto copy = scratch<float>(meet || job.halves ? mtp::CHUNK : 0, job.stride);
    int64_t old = lanes.slot * job.rows * job.stride;
    mtp::Attention a{queries.get(),
                     lanes.seen,
                     job.halves ? nullptr : static_cast<const float*>(job.cache) + old,
                     job.halves ? static_cast<const mtp::Bf16*>(job.cache) + old : nullptr,
                     job.fresh + lanes.slot * job.fresh_rows * job.stride,
                     lanes.base,
                     job.stride,
                     lanes.group * job.width,
                     job.width,
                     values + lanes.group * latent,
                     latent};
    k.attend(a, begin, end, copy.get(), out);
  }

  void finish(const Job& job, const Lanes& lanes, const mtp::Partial& done) const {
    for (int64_t i = 0; i < LANES && lanes.first + i < job.queries(); i++)
      finish(done, i, job.y + job.place(lanes.slot, lanes.group, lanes.first + i) * latent);
  }
};

}  // namespace
