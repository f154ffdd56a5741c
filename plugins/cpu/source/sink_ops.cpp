// Attention to a window of rows and to compressed rows.
#include "attention_ops.h"
#include "registry.h"

namespace {

// As defined in `plugins/compressed_attention/op.py`: queries q [B, T, H * D], a sink for each of H
// heads, angles [B, T, R / 2], a cache [B, 1, S, D] of rows, base [B], first [B], fresh rows
// [B, 1, F, D], and a cache [B, 1, N, C] of compressed rows (`CompressedCache`) with the numbers
// [B, T, k] of those that are chosen -> [B, T, H * D]. Position p is in row p % S of the cache, or
// in row p if S is no multiple of 64. written: the fresh rows are in the cache.
//
// A token's heads are the lanes. The rows are those of its window, cut at absolute positions, then
// the compressed ones that it sees or that are chosen, `PART` at a time; their partial results are
// folded in this order, then the sink.
struct CompressedAttention : AttentionOp {
  static constexpr const char* name = "CompressedAttention";
  static constexpr Operand inputs[] = {FLOAT, FLOAT, FLOAT, FLOAT,      ANY,
                                       INT64, INT64, FLOAT, maybe(ANY), maybe(INT64)};
  static constexpr int64_t PART = 128;  // rows of a partial result; a multiple of CHUNK
  using AttentionOp::AttentionOp;
  int64_t ratio = from.integer("ratio"), group = from.integer("group");
  float epsilon = from.real("epsilon");

  void compute(Call& call) const {
    Tensor q = call.input(0), sinks = call.input(1);
    REQUIRE(q.rank() == 3 && heads > 0 && latent > 0 && window > 0 && sinks.is({heads}) &&
                q.shape[2] == product(heads, latent),
            name,
            std::to_string(heads) + " heads of " + std::to_string(latent) + " numbers, queries " +
                q.text() + ", sinks " + sinks.text());
    int64_t slots = q.shape[0], tokens = q.shape[1], all = slots * tokens;
    Angles angles(name, call.input(2), call.input(3), slots, tokens);
    REQUIRE(2 * angles.half <= latent, name, "angles " + angles.cos.text() + " of a head");
    Job job(*this, call, slots, tokens);
    float* y = call.output(q.shape);
    int64_t blocks = ceil_div(heads, LANES), most = 0, rows = 0;
    std::vector<Token> seen;
    for (int64_t m = 0; m < all; m++) {
      seen.push_back(job.look(*this, m));
      most = std::max(most, seen.back().parts());
      rows = std::max(rows, seen.back().end - seen.back().begin + seen.back().count);
    }
    auto queries = scratch<float>(all, blocks, latent, LANES);
    run_tasks(call, product(all, blocks), product(8, all, heads, latent), [&](int64_t t) {
      lay_out(q.data<float>(), angles, t / blocks, t % blocks * LANES,
              &queries[t * latent * LANES]);
    });
    in_splits(
        call, all, blocks, most, product(all, heads, rows, 2, latent),
        [&](int64_t m) { return seen[m].parts(); },
        [&](int64_t m, int64_t part, float* to) {
          attend_part(job, seen[m], part, &queries[m * blocks * latent * LANES], to);
        },
        [&](int64_t m, int64_t block, float* part) {
          finish_lanes(sinks.data<float>(), angles, m, block * LANES, part, y + m * heads * latent);
        });
  }

 private:
  // The rows that a token sees: positions of its window, and compressed rows or chosen ones.
  struct Token {
    int64_t slot, begin, end, base, count;
    const int64_t* chosen;
    int64_t first() const { return begin / PART; }
    int64_t parts_of_window() const { return end > begin ? ceil_div(end, PART) - first() : 0; }
    int64_t parts() const { return parts_of_window() + ceil_div(count, PART); }
  };

  struct Job {
    Rows rows;
    int64_t tokens;
    const int64_t *base, *first;
    std::unique_ptr<CompressedCache> compressed;
    Tensor chosen;

    Job(const CompressedAttention& own, Call& call, int64_t slots, int64_t tokens)
        : rows(name, call.input(4), call.input(7), slots), tokens(tokens) {
      Tensor base = call.input(5), first = call.input(6), cache = call.input(8, true);
      REQUIRE(!rows.integers && rows.stride == own.latent, name, "rows " + rows.fresh.text());
      REQUIRE(base.is({slots}) && first.is({slots}), name, "no place for each slot");
      this->base = base.data<int64_t>(), this->first = first.data<int64_t>();
      chosen = call.input(9, true);
      if (cache.memory)
        compressed.reset(
            new CompressedCache(name, cache, {own.ratio, own.group}, slots, own.latent));
      bool fits = chosen.rank() == 3 && chosen.shape[0] == slots && chosen.shape[1] == tokens;
      REQUIRE(!chosen.memory || (compressed && fits), name, "chosen rows " + chosen.text());
    }

    // Clamps positions, as an idle slot may have any base and first.
    Token look(const CompressedAttention& own, int64_t m) const {
      bool ring = rows.old > 0 && rows.old % mtp::CHUNK == 0;
      int64_t slot = m / tokens, last = INT32_MAX - rows.count - tokens;
      int64_t most = ring ? last : min(rows.old, last);
      int64_t begin = std::max<int64_t>(0, min(base[slot], most));
      int64_t limit = own.written ? most : begin + rows.count;
      int64_t offset = std::max<int64_t>(0, min(first[slot], limit));
      int64_t end = min(limit, begin + offset + m % tokens + 1);
      Token token{slot,   std::max<int64_t>(0, end - own.window), end, own.written ? end : begin, 0,
                  nullptr};
      if (!compressed) return token;
      token.count = min(compressed->count, end / own.ratio);
      if (!chosen.memory) return token;
      token.count = chosen.shape[2];
      token.chosen = chosen.data<int64_t>() + m * token.count;
      while (token.count > 0 && token.chosen[token.count - 1] == -1) token.count--;
      return token;
    }
  };

  // Writes 16 heads of token m, normed, rotated and scaled, or zeros into lanes.
  void lay_out(const float* q, const Angles& angles, int64_t m, int64_t head, float* to) const {
    std::vector<float> ones(latent, 1.0f), own(latent);
    float* end = own.data() + latent - 2 * angles.half;
    for (int64_t lane = 0; lane < LANES; lane++, head++) {
      if (head < heads) {
        k.norm(q + (m * heads + head) * latent, ones.data(), latent, epsilon, own.data());
        angles.rotate_row(m, end, true, end);
      }
      for (int64_t c = 0; c < latent; c++)
        to[c * LANES + lane] = head < heads ? own[c] * scale : 0.0f;
    }
  }

  void attend_part(const Job& job, const Token& token, int64_t part, const float* queries,
                   float* to) const {
    const Rows& rows = job.rows;
    int64_t later = part - token.parts_of_window();
    int64_t at = later < 0 ? token.first() + part : later;
    int64_t begin = at * PART, end = min(later < 0 ? token.end : token.count, begin + PART);
    mtp::Attention a{};
    a.width = a.latent = latent;
    std::unique_ptr<float[]> copy;
    if (later < 0) {
      begin = std::max(begin, token.begin);
      copy = scratch<float>(mtp::CHUNK, latent);
      a.stride = latent, a.base = token.base, a.ring = std::max<int64_t>(1, rows.old);
      int64_t old = token.slot * rows.old * latent;
      if (rows.halves)
        a.halves = rows.cache.data<mtp::Bf16>() + old;
      else
        a.cache = rows.cache.data<float>() + old;
      a.fresh = rows.fresh.data<float>() + token.slot * rows.count * latent;
    } else if (begin >= end) {  // there are no rows
    } else if (token.chosen || job.compressed->halves) {
      copy = scratch<float>(PART, latent);
      end = copy_rows(*job.compressed, token, begin, end, copy.get());
      begin = 0;
      a.cache = copy.get(), a.stride = latent, a.base = a.ring = PART;
    } else {
      a.cache = job.compressed->at(token.slot, 0, 0, latent, nullptr);
      a.stride = job.compressed->stride, a.base = a.ring = job.compressed->count;
    }
    int32_t seen[LANES], from[LANES] = {};
    a.seen = seen, a.from = from;
    for (int64_t head = 0; head < heads; head += LANES, to += (2 + latent) * LANES) {
      for (int64_t i = 0; i < LANES; i++)
        seen[i] = head + i < heads ? static_cast<int32_t>(end) : 0;
      a.queries = queries + head * latent;
      k.attend(a, begin, end, copy.get(), partial(to));
    }
  }

  // Copies compressed rows, or chosen ones that exist, to adjacent places; returns their number.
  int64_t copy_rows(const CompressedCache& rows, const Token& token, int64_t begin, int64_t end,
                    float* to) const {
    int64_t count = 0;
    for (int64_t i = begin; i < end; i++) {
      int64_t row = token.chosen ? token.chosen[i] : i;
      float* own = to + count * latent;
      if (row == NO_NUMBER) std::fill_n(own, latent, NAN);
      if (row != NO_NUMBER && (row < 0 || row >= rows.count)) continue;
      count++;
      if (row < 0) continue;
      const float* from = rows.at(token.slot, row, 0, latent, own);
      if (from != own) std::copy_n(from, latent, own);
    }
    return count;
  }

  // Folds the sinks of 16 heads of token m, and writes their results, rotated back.
  void finish_lanes(const float* sinks, const Angles& angles, int64_t m, int64_t head, float* part,
                    float* y) const {
    std::vector<float> sink((2 + latent) * LANES, 0.0f), back(angles.half);
    int64_t some = min(LANES, heads - head), place = m * angles.half;
    std::copy_n(sinks + head, some, sink.begin());
    std::fill_n(sink.begin() + LANES, LANES, 1.0f);
    k.fold(partial(part), partial(sink.data()), latent);
    for (int64_t i = 0; i < angles.half; i++) back[i] = -angles.sin.data<float>()[place + i];
    finish(part, some, [&](int64_t lane) { return y + (head + lane) * latent; });
    for (int64_t lane = 0; lane < some; lane++) {
      float* end = y + (head + lane + 1) * latent - 2 * angles.half;
      rotate(end, angles.cos.data<float>() + place, back.data(), angles.half, true, end);
    }
  }
};

const Registered<CompressedAttention> registered;

}  // namespace
