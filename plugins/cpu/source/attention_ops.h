// Attention over cached and fresh rows.
#pragma once
#include "cache_rows.h"

namespace {

// q [B, H, T, C], cache [B, 1, S, R], fresh [B, 1, F, R], base [B], first [B] -> [B, H, T, latent];
// or, if `heads` is H, q [B, T, H * C] -> [B, T, H * latent].
//
// Query t sees the cache's rows before base and the fresh rows up to first + t, whose positions
// begin at base. With a window it sees that many of them, the last one included; position p is then
// in row p % S of the cache. written: the fresh rows are in the cache from base on. The cache may
// be bfloat16; fresh rows are then rounded to it already. Or it is int8 (`Sections`); fresh rows
// are then rounded here. A row has a key of C numbers for each of `groups` heads, and from number
// `values` on `latent` values for each, which may overlap the keys. H / groups adjacent query heads
// share a key.
//
// chosen [B, T, k], only for one group: a query sees only the rows at these positions, in their
// order. Positions that do not exist, such as -1, are skipped, but NO_NUMBER makes the result NaN.
// The result is that of attention over a cache of only these rows.
struct AttentionOp : FloatOperator {
  static constexpr const char* name = "Attention";
  static constexpr Operand inputs[] = {FLOAT, ANY, FLOAT, INT64, INT64, maybe(INT64)};
  using FloatOperator::FloatOperator;
  float scale = from.real("scale");
  int64_t groups = from.integer("groups"), values = from.integer("values");
  int64_t latent = from.integer("latent"), heads = from.value_or<int64_t>("heads", 0);
  int64_t window = from.value_or<int64_t>("window", 0);  // 0: no bound
  bool written = from.flag("written");

  void compute(Call& call) const {
    Tensor q = call.input(0), cache = call.input(1), fresh = call.input(2);
    Job job(*this, q, cache, fresh);
    float* y = call.output(q.with_last(product(latent, std::max<int64_t>(heads, 1))));
    attend(call, job, call.input(3), call.input(4), call.input(5, true), y);
  }

  // Attends for another operator, with that operator's operands.
  void attend(Call& call, const Tensor& q, const Tensor& cache, const Tensor& fresh,
              const Tensor& base, const Tensor& first, const Tensor& chosen, float* y) const {
    attend(call, Job(*this, q, cache, fresh), base, first, chosen, y);
  }

 protected:
  struct Job {
    Rows rows;
    int64_t slots, heads, tokens, width, per_group;
    bool by_token;  // a token's heads are adjacent
    const float* q;

    Job(const AttentionOp& own, const Tensor& queries, const Tensor& cache, const Tensor& fresh)
        : rows(name, cache, fresh, queries.rank() > 0 ? queries.shape[0] : 0),
          by_token(own.heads > 0),
          q(queries.data<float>()) {
      REQUIRE(queries.rank() == (by_token ? 3 : 4), name, "queries " + queries.text());
      REQUIRE(!by_token || queries.shape[2] % own.heads == 0, name,
              std::to_string(own.heads) + " heads, " + queries.text());
      slots = queries.shape[0], tokens = queries.shape[by_token ? 1 : 2];
      heads = by_token ? own.heads : queries.shape[1];
      width = by_token ? queries.shape[2] / heads : queries.shape[3];
      REQUIRE(own.groups > 0 && own.latent > 0 && own.values >= 0 && own.values <= rows.stride &&
                  width > 0 && heads % own.groups == 0 &&
                  product(own.groups, width) <= rows.stride &&
                  product(own.groups, own.latent) <= rows.stride - own.values,
              name, "queries " + queries.text() + " over " + cache.text());
      per_group = heads / own.groups;
    }
    // Returns the number of queries of a slot and a group; query i is of token i / per_group.
    int64_t queries() const { return per_group * tokens; }
    // Returns the row in q of a head of token m (of all slots).
    int64_t row(int64_t m, int64_t head) const {
      return by_token ? m * heads + head : (m / tokens * heads + head) * tokens + m % tokens;
    }
    int64_t place(int64_t slot, int64_t group, int64_t query) const {
      return row(slot * tokens + query / per_group, group * per_group + query % per_group);
    }
  };
  // Some queries of a slot and a group: at most 16, or QUERIES over int8 rows.
  struct Lanes {
    int64_t slot, group, first, count, base, end;
    int64_t split;  // the first one that a query sees
    int32_t seen[mtp::QUERIES], from[mtp::QUERIES];
    int64_t splits() const { return ceil_div(end, mtp::SPLIT) - split; }
  };

  void attend(Call& call, const Job& job, const Tensor& base, const Tensor& first,
              const Tensor& chosen, float* y) const {
    REQUIRE(base.is({job.slots}) && first.is({job.slots}), name, "no place for each slot");
    if (chosen.memory) return attend_to(call, job, base, chosen, y);
    std::vector<Lanes> lanes;
    int64_t splits = 0, blocks = job.rows.integers ? mtp::QUERIES / LANES : 1;
    auto cut = [&] {
      lanes.clear();
      for (int64_t i = 0; i < product(job.slots, groups, ceil_div(job.queries(), blocks * LANES));
           i++) {
        lanes.push_back(look(job, i, blocks * LANES, base.data<int64_t>(), first.data<int64_t>()));
        splits = std::max(splits, lanes.back().splits());
      }
    };
    blocks = std::max<int64_t>(1, min(blocks, ceil_div(job.queries(), LANES)));
    cut();
    while (blocks > 1 && static_cast<int64_t>(lanes.size()) * splits < ort::most_threads)
      blocks = ceil_div(blocks, 2), cut();
    std::unique_ptr<Rounded> rounded(job.rows.integers ? new Rounded(*this, call, job) : nullptr);
    in_splits(
        call, static_cast<int64_t>(lanes.size()), blocks, splits,
        product(job.slots, job.heads, job.tokens, splits, mtp::SPLIT, job.width + latent),
        [&](int64_t i) { return lanes[i].splits(); },
        [&](int64_t i, int64_t split, float* part) {
          if (rounded)
            rounded->attend(lanes[i], lanes[i].split + split, part);
          else
            attend(job, lanes[i], lanes[i].split + split, part);
        },
        [&](int64_t i, int64_t block, const float* part) {
          int64_t first = block * LANES;
          finish(part, min(lanes[i].count - first, LANES), [&](int64_t n) {
            return y +
                   job.place(lanes[i].slot, lanes[i].group, lanes[i].first + first + n) * latent;
          });
        });
  }

  // Returns which positions `each` queries see; clamped, as an idle slot may have any base and
  // first.
  Lanes look(const Job& job, int64_t number, int64_t each, const int64_t* base,
             const int64_t* first) const {
    int64_t pieces = ceil_div(job.queries(), each), group = number / pieces, old = job.rows.old;
    int64_t at = number % pieces * each;
    Lanes lanes{group / groups, group % groups, at, min(each, job.queries() - at), 0, 0, 0, {}, {}};
    int64_t most = INT32_MAX - job.tokens, given = base[lanes.slot];
    int64_t begin = window ? std::max<int64_t>(0, min(given, most)) : job.rows.clamped(given);
    int64_t limit = written ? (window ? most : old) : min<int64_t>(begin + job.rows.count, most);
    lanes.base = written ? limit : begin;
    int64_t offset = std::max<int64_t>(0, min(first[lanes.slot], limit)), lowest = INT32_MAX;
    for (int64_t i = 0; i < lanes.count; i++) {
      int64_t seen = min(limit, begin + offset + (at + i) / job.per_group + 1);
      int64_t from = window ? std::max<int64_t>(0, seen - window) : 0;
      lanes.seen[i] = static_cast<int32_t>(seen), lanes.from[i] = static_cast<int32_t>(from);
      lanes.end = std::max(lanes.end, seen), lowest = min(lowest, from);
    }
    lanes.split = lowest / mtp::SPLIT;
    return lanes;
  }

  // Attends in splits, with `blocks` partial results of 16 lanes each, and folds the splits in
  // ascending order, whichever thread made them. Each of `count` jobs is a task, if all threads
  // then have some; otherwise each split of a job is a task, a few splits of all jobs at a time.
  template <class S, class A, class F>
  void in_splits(Call& call, int64_t count, int64_t blocks, int64_t most, int64_t work,
                 const S& splits, const A& attend, const F& finish) const {
    int64_t block = product(2 + latent, LANES), size = product(blocks, block);
    int64_t enough = std::max<int64_t>(16, 4 * ort::most_threads);
    auto fold = [&](float* into, float* later) { k.fold(partial(into), partial(later), latent); };
    if (count >= enough || most <= 1) {
      return run_tasks(call, count, work, [&](int64_t i) {
        auto parts = scratch<float>(2, size);
        attend(i, 0, &parts[0]);
        for (int64_t n = 1; n < splits(i); n++) {
          attend(i, n, &parts[size]);
          for (int64_t at = 0; at < size; at += block) fold(&parts[at], &parts[size + at]);
        }
        for (int64_t b = 0; b < blocks; b++) finish(i, b, &parts[b * block]);
      });
    }
    int64_t some = min(most - 1, ceil_div(enough, count));  // besides the sum of those before
    auto parts = scratch<float>(count, 1 + some, size);
    for (int64_t begin = 0, end; begin < most; begin = end) {
      end = min(most, std::max<int64_t>(begin, 1) + some);
      auto place = [&](int64_t i, int64_t split) {
        return &parts[(i * (1 + some) + split - begin + (begin > 0)) * size];
      };
      run_tasks(call, product(count, end - begin), work, [&](int64_t t) {
        int64_t i = t / (end - begin), split = begin + t % (end - begin);
        if (split == 0 || split < splits(i)) attend(i, split, place(i, split));
      });
      run_tasks(call, product(count, blocks), product(count, end - begin, size), [&](int64_t t) {
        int64_t i = t / blocks, at = t % blocks * block;
        float* into = &parts[i * (1 + some) * size + at];
        for (int64_t n = std::max<int64_t>(begin, 1); n < min(end, splits(i)); n++)
          fold(into, place(i, n) + at);
        if (end == most) finish(i, t % blocks, into);
      });
    }
  }

  // Runs attention to chosen rows.
  void attend_to(Call& call, const Job& job, const Tensor& base, const Tensor& chosen,
                 float* y) const {
    REQUIRE(groups == 1 && !job.by_token && chosen.rank() == 3 && chosen.shape[0] == job.slots &&
                chosen.shape[1] == job.tokens && chosen.shape[2] > 0,
            name, "chosen rows " + chosen.text() + " of " + std::to_string(job.tokens) + " tokens");
    REQUIRE(!job.rows.integers, name, "chosen rows in int8");
    REQUIRE(values == 0 && latent <= job.width, name,
            std::to_string(latent) + " values of chosen rows, which are " +
                std::to_string(job.width) + " wide");
    int64_t count = job.slots * job.tokens, most = chosen.shape[2],
            splits = ceil_div(most, mtp::SPLIT);
    in_splits(
        call, count, ceil_div(job.heads, LANES), splits,
        product(count, most, job.heads, job.width + latent), [&](int64_t) { return splits; },
        [&](int64_t m, int64_t split, float* parts) {
          attend_to(job, base.data<int64_t>(), chosen, m, split, parts);
        },
        [&](int64_t m, int64_t block, const float* part) {
          int64_t first = block * LANES;
          finish(part, min(job.heads - first, LANES),
                 [&](int64_t n) { return y + job.row(m, first + n) * latent; });
        });
  }

  // Runs a token's heads on a split of its chosen rows, which are copied to adjacent places.
  void attend_to(const Job& job, const int64_t* base, const Tensor& chosen, int64_t m,
                 int64_t split, float* parts) const {
    int64_t most = chosen.shape[2], begin = split * mtp::SPLIT, count = 0;
    int64_t end = min(most, begin + mtp::SPLIT), slot = m / job.tokens;
    auto rows = scratch<float>(end - begin, job.width);
    int64_t from = written ? job.rows.old : job.rows.clamped(base[slot]);
    int64_t limit = written ? from : from + job.rows.count;
    for (int64_t i = begin; i < end; i++) {
      int64_t at = chosen.data<int64_t>()[m * most + i];
      float* to = &rows[count * job.width];
      if (at == NO_NUMBER) std::fill_n(to, job.width, NAN);
      if (at == NO_NUMBER || (at >= 0 && at < limit)) count++;
      if (at < 0 || at >= limit) continue;
      const float* row = job.rows.at(slot, from, at, 0, job.width, to);
      if (row != to) std::copy_n(row, job.width, to);
    }
    for (int64_t head = 0; head < job.heads; head += LANES, parts += (2 + latent) * LANES) {
      int32_t seen[LANES] = {}, from_none[LANES] = {};
      int64_t some = min(LANES, job.heads - head);
      std::fill_n(seen, some, static_cast<int32_t>(count));
      auto queries = put_queries(job, some, [&](int64_t i) { return job.row(m, head + i); });
      mtp::Attention a{queries.get(), seen,      from_none, &rows[0],  nullptr, nullptr, count,
                       count,         job.width, 0,         job.width, 0,       latent};
      k.attend(a, 0, count, nullptr, partial(parts));
    }
  }

  // Runs some lanes on a split of the rows.
  void attend(const Job& job, const Lanes& lanes, int64_t split, float* part) const {
    auto queries = put_queries(job, lanes.count, [&](int64_t i) {
      return job.place(lanes.slot, lanes.group, lanes.first + i);
    });
    const Rows& rows = job.rows;
    int64_t begin = split * mtp::SPLIT, end = min(lanes.end, begin + mtp::SPLIT);
    if (split == lanes.split) begin = *std::min_element(lanes.from, lanes.from + lanes.count);
    bool meet = begin < lanes.base && lanes.base < end;
    auto copy = scratch<float>(meet || rows.halves ? mtp::CHUNK : 0, rows.stride);
    int64_t old = lanes.slot * rows.old * rows.stride;
    mtp::Attention a{};
    a.queries = queries.get(), a.seen = lanes.seen, a.from = lanes.from,
    a.ring = std::max<int64_t>(1, rows.old);
    if (rows.halves)
      a.halves = rows.cache.data<mtp::Bf16>() + old;
    else
      a.cache = rows.cache.data<float>() + old;
    a.fresh = rows.fresh.data<float>() + lanes.slot * rows.count * rows.stride;
    a.base = lanes.base, a.stride = rows.stride;
    a.keys = lanes.group * job.width, a.width = job.width;
    a.values = values + lanes.group * latent, a.latent = latent;
    k.attend(a, begin, end, copy.get(), partial(part));
  }

  // The queries and fresh rows of an attention over an int8 cache, rounded to int8. Keys that begin
  // with their values have these in a section of their own.
  struct Rounded {
    const AttentionOp& own;
    const Job& job;
    bool one;                               // the values are the beginning of the key
    Sections sections;                      // of a row
    int64_t key, value;                     // blocks of one
    std::unique_ptr<InputBlock[]> queries;  // [rows of q][key]
    std::unique_ptr<int8_t[]> fresh;        // [slots][fresh rows][bytes]

    Rounded(const AttentionOp& own, Call& call, const Job& job)
        : own(own), job(job), one(own.values == 0), sections(lay_out(own, job)) {
      REQUIRE(job.rows.cache.shape[3] == sections.bytes, name,
              "int8 rows " + job.rows.cache.text() + " for " + job.rows.fresh.text());
      value = ceil_div(own.latent, BLOCK);
      key = one ? static_cast<int64_t>(sections.blocks.size()) : value;
      int64_t rows = job.slots * job.heads * job.tokens, news = job.slots * job.rows.count;
      queries = scratch<InputBlock>(rows, key);
      run_tasks(call, rows, product(4, rows, job.width), [&](int64_t i) { round_query(i); });
      if (own.written) return;
      fresh = scratch<int8_t>(news, sections.bytes);
      for (int64_t i = 0; i < news; i++)
        sections.round(job.rows.fresh.data<float>() + i * job.rows.stride,
                       &fresh[i * sections.bytes]);
    }

    // Checks the sizes first: sections of damaged ones would fill the memory.
    static Sections lay_out(const AttentionOp& own, const Job& job) {
      bool one = own.values == 0;
      REQUIRE(one ? own.groups == 1 && own.latent <= job.width && job.rows.stride == job.width
                  : own.latent == job.width && own.values == product(own.groups, job.width) &&
                        job.rows.stride == product(2, own.values),
              name, "keys and values of other sizes in int8 rows");
      return one ? Sections({own.latent, job.width - own.latent}, 1)
                 : Sections({job.width}, 2 * own.groups);
    }

    // Rounds a query, scaled, by block: its largest number becomes 64.
    void round_query(int64_t row) {
      const float* q = job.q + row * job.width;
      bool whole = job.width == key * BLOCK;
      auto filled = scratch<float>(whole ? 0 : key * BLOCK);  // smaller blocks, with zeros
      for (int64_t b = 0; b < key && !whole; b++) {
        const mtp::RowBlock& block = sections.blocks[b];
        float* to = &filled[b * BLOCK];
        std::fill(std::copy_n(q + block.values, block.count, to), to + BLOCK, 0.0f);
      }
      own.k.quantise(whole ? q : filled.get(), key, own.scale, 64.0f, &queries[row * key]);
    }

    void attend(const Lanes& lanes, int64_t split, float* part) const {
      const InputBlock* in[mtp::QUERIES];
      int32_t seen[mtp::QUERIES], from[mtp::QUERIES];
      const int8_t* rows[mtp::SPLIT] = {};
      int64_t begin = split * mtp::SPLIT, end = min(lanes.end, begin + mtp::SPLIT);
      int64_t bytes = sections.bytes;
      for (int64_t i = 0; i < lanes.count; i++) {
        in[i] = &queries[job.place(lanes.slot, lanes.group, lanes.first + i) * key];
        seen[i] =
            static_cast<int32_t>(std::max<int64_t>(0, min<int64_t>(lanes.seen[i], end) - begin));
        from[i] = min(seen[i], static_cast<int32_t>(std::max<int64_t>(0, lanes.from[i] - begin)));
      }
      for (int64_t r = 0; r < mtp::SPLIT && begin < end; r++) {
        int64_t at = min(begin + r, end - 1);
        const int8_t* old =
            job.rows.cache.data<int8_t>() +
            (lanes.slot * job.rows.old + at % std::max<int64_t>(1, job.rows.old)) * bytes;
        rows[r] =
            at < lanes.base ? old : &fresh[(lanes.slot * job.rows.count + at - lanes.base) * bytes];
      }
      const mtp::RowBlock* keys = &sections.blocks[lanes.group * key];
      const mtp::RowBlock* values = &sections.blocks[one ? 0 : (own.groups + lanes.group) * value];
      auto scores = scratch<float>(lanes.count, mtp::SPLIT);
      auto panel = scratch<uint8_t>(std::max(key, mtp::SPLIT / BLOCK), PANEL * (BLOCK + 4));
      own.k.attend_integers(
          {lanes.count, in, seen, from, rows, keys, values, key, value, scores.get(), panel.get()},
          own.latent, part);
    }
  };

  // Returns rows row_of(0 .. count - 1) of q, scaled, in lanes [width][LANES]; other lanes are 0.
  // Here and in `finish` a few numbers of all lanes come before the next few: all numbers of a lane
  // would fill the nearest cache.
  template <class F>
  std::unique_ptr<float[]> put_queries(const Job& job, int64_t count, const F& row_of) const {
    auto queries = scratch<float>(job.width, LANES);
    if (count < LANES) std::fill_n(&queries[0], job.width * LANES, 0.0f);
    for (int64_t c = 0; c < job.width; c += LANES)
      for (int64_t lane = 0; lane < count; lane++) {
        const float* from = job.q + row_of(lane) * job.width;
        for (int64_t i = c; i < min(c + LANES, job.width); i++)
          queries[i * LANES + lane] = from[i] * scale;
      }
    return queries;
  }

  // Writes the results of the first `count` lanes, lane n to row_of(n).
  template <class F>
  void finish(const float* part, int64_t count, const F& row_of) const {
    float factors[LANES];
    for (int64_t lane = 0; lane < count; lane++) {
      float total = part[LANES + lane];
      factors[lane] = total == 0.0f ? 0.0f : 1.0f / total;  // or NaN
    }
    for (int64_t d = 0; d < latent; d += LANES)
      for (int64_t lane = 0; lane < count; lane++) {
        const float* from = part + (2 + d) * LANES + lane;
        float* to = row_of(lane) + d;
        for (int64_t i = 0; i < min(LANES, latent - d); i++)
          to[i] = from[i * LANES] * factors[lane];
      }
  }

  static mtp::Partial partial(float* memory) {
    return {memory, memory + LANES, memory + 2 * LANES};
  }
};

}  // namespace
